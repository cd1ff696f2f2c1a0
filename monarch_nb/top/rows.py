"""Rows of a terminal from the document of a store: one for each host, or for each rank. No I/O."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_nb.store import WORST_FIRST
from monarch_nb.wire import counted, size_text

Document = Mapping[str, Any]
BY_HOST_FROM = 200  # ranks: more are shown by their hosts, until one is opened
_RUNNING = frozenset({"idle", "busy"})
SORTS = ("place", "state", "since", "cpu", "memory", "rate")
HEADS = ("host", "mesh", "rank", "state", "what", "for", "CPU", "memory (Pss)", "calls/s")


class Row(NamedTuple):
    """A line. `stands_for` is the number of ranks of a host, 0 for a rank."""

    key: tuple[str, str, int]  # uid, host, index of the rank or -1
    host: str
    mesh: str
    place: str
    state: str
    what: str
    since: float | None
    cpu: float | None
    memory: float | None
    rate: float | None
    stands_for: int = 0
    memory_kind: str = "Pss"


class ViewChoice(NamedTuple):
    """The view that a person has chosen."""

    query: str = ""
    sort: str = "place"
    by_host: bool | None = None  # None: by host if there are many ranks
    host: str = ""  # the only one that is shown


def rows(document: Document, look: ViewChoice) -> list[Row]:
    """Returns all rows in the chosen order: worst, longest or most first."""
    ranks = [row for uid in roots(document) for row in _ranks(document, uid, look)]
    total = sum(_size(document["meshes"][uid]) for uid in roots(document))
    by_host = total >= BY_HOST_FROM and not look.query and not look.host if look.by_host is None else look.by_host
    shown = _by_host(ranks) if by_host else ranks
    return shown if look.sort == "place" else sorted(shown, key=lambda row: _order(row, look.sort))


def roots(document: Document) -> list[str]:
    """Returns the living process meshes."""
    meshes = document.get("meshes", {})
    return [uid for uid, mesh in meshes.items() if mesh["kind"] == "procs" and not mesh.get("stopped")]


def is_measured(document: Document) -> bool:
    """Returns whether each running rank has reported its use of resources."""
    ranks = (rank for uid in roots(document) for rank in document["ranks"].get(uid, {}).values())
    return all("cpu" in rank for rank in ranks if rank.get("state") in _RUNNING)


def summary(document: Document) -> str:
    """Summarizes the cluster in one line."""
    meshes = document.get("meshes", {})
    counts: Counter[str] = Counter()
    for uid in roots(document):
        counts.update(meshes[uid]["counts"])
    states = [f"{counts[state]:,} {state}" for state in WORST_FIRST if counts[state]]
    hosts = {host for uid in roots(document) for host in meshes[uid].get("hosts", ())}
    opened = sum(failure["state"] == "open" for failure in document.get("failures", {}).values())
    facts = [f"{counted(sum(counts.values()), 'rank')} on {counted(len(hosts), 'host')}", *states]
    return " · ".join([*facts, *([f"{counted(opened, 'failure')} not healed"] if opened else [])])


def _size(mesh: Mapping[str, Any]) -> int:
    return math.prod(mesh["sizes"])


def _point(sizes: Sequence[int], index: int) -> tuple[int, ...]:
    point = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        point.append(coordinate)
    return tuple(reversed(point))


def _ranks(document: Document, uid: str, look: ViewChoice) -> Iterator[Row]:
    mesh = document["meshes"][uid]
    records, hosts, per_host = document["ranks"].get(uid, {}), mesh.get("hosts") or [""], mesh.get("per_host") or 1
    labels, sizes = mesh["labels"], mesh["sizes"]
    rates = _rates(document, uid)
    fits: Fits | None = fitting(look.query, mesh["labels"])
    for index in range(_size(mesh)):
        host = hosts[min(index // per_host, len(hosts) - 1)]
        host = document["hosts"].get(host, {}).get("name", host)
        if look.host and host != look.host:
            continue
        record = {"state": mesh["state"], **records.get(str(index), {})}
        if index in rates:
            record["rate"] = rates[index]
        point = _point(sizes, index)
        if fits is not None and not fits(record, point, index, host):
            continue
        position = " ".join(f"{label}={coordinate}" for label, coordinate in zip(labels, point, strict=True))
        text = str(record.get("endpoint") or record.get("detail") or "")
        yield Row(
            (uid, host, index), host, mesh["name"], position or "one", record["state"], text, record.get("since"),
            record.get("cpu"), record.get("memory"), record.get("rate"), 0, record.get("memory_kind", "Pss"),
        )  # fmt: skip


def _rates(document: Document, uid: str) -> dict[int, float]:
    """Returns the calls per second of all actors by process, located by their strides."""
    rates: dict[int, float] = {}
    for mesh_uid, mesh in document["meshes"].items():
        if mesh.get("on") != uid or mesh.get("stopped"):
            continue
        for index, record in document["ranks"].get(mesh_uid, {}).items():
            if rate := record.get("rate"):
                point = _point(mesh["sizes"], int(index))
                picked = mesh.get("picked")
                along = 0 if picked else sum(a * stride for a, stride in zip(point, mesh["strides"], strict=True))
                base = picked[int(index)] if picked else mesh["offset"] + along
                rates[base] = rates.get(base, 0.0) + rate
    return rates


def _by_host(ranks: list[Row]) -> list[Row]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in ranks:
        groups.setdefault((row.key[0], row.host), []).append(row)
    return [_host_row(uid, host, group) for (uid, host), group in groups.items()]


def _host_row(uid: str, host: str, group: list[Row]) -> Row:
    states = Counter(row.state for row in group)
    worst = min(states, key=WORST_FIRST.index)
    worst_rows = [row for row in group if row.state == worst]
    counts = ", ".join(f"{states[state]} {state}" for state in WORST_FIRST if states[state])
    causes = Counter(row.what for row in worst_rows if row.what).most_common(1)
    text = f"{counts}: {causes[0][0]}" if causes else counts
    since = [row.since for row in worst_rows if row.since is not None]
    return Row(
        (uid, host, -1), host, group[0].mesh, counted(len(group), "rank"), worst, text,
        min(since) if since else None, _sum([row.cpu for row in group]), _sum([row.memory for row in group]),
        _sum([row.rate for row in group]), len(group),
        " and ".join(sorted({row.memory_kind for row in group if row.memory is not None})),
    )  # fmt: skip


def _sum(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _order(row: Row, sort: str) -> tuple[object, ...]:
    if sort == "state":
        return (WORST_FIRST.index(row.state),)
    value = getattr(row, sort)
    if value is None:
        return (1, 0.0)
    return (0, value if sort == "since" else -value)


def cells(row: Row, now: float) -> tuple[str, ...]:
    """Formats a row as the columns of HEADS."""
    lasts = "" if row.since is None or row.state in ("idle", "stopped") else _duration(now - row.since)
    return (
        row.host, row.mesh, row.place, row.state, _without_controls(row.what), lasts,
        "" if row.cpu is None else f"{100 * row.cpu:.0f} %", _memory(row),
        "" if row.rate is None else f"{row.rate:,.1f}",
    )  # fmt: skip


def _memory(row: Row) -> str:
    """Formats the memory of a row, with its kind unless that is Pss."""
    if row.memory is None:
        return ""
    return size_text(row.memory) + ("" if row.memory_kind == "Pss" else f" {row.memory_kind}")


def _without_controls(text: str) -> str:
    """Replaces control characters, which a terminal could execute."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


Fits = Callable[[Mapping[str, object], Sequence[int], int, str], bool]
"""Decides whether a rank matches: its record with its state, its point, its index, the name of its host."""

_SCALES = {"": 1.0, "%": 0.01, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_COORDINATE = re.compile(r"(\w+)=(\d*)(?:(:)(\d*))?")
_RANKS = re.compile(r"(\d+)(?:-(\d+))?")
_MEASURED = re.compile(r"(cpu|memory|gpu|gpu_memory|queue|rate|errors|calls)([<>])(\d+(?:\.\d+)?)(%|kb|mb|gb)?")


def fitting(query: str, labels: Sequence[str]) -> Fits | None:
    """Parses a query; None for an empty one.

    Words are states ("failed"), places ("hosts=3", "gpus=0:4"), ranks ("12", "4-7"), measurements ("cpu>50%",
    "memory>2GB"), or a part of a host's name, an endpoint or a reason.
    """
    tests = [_fit(word, [label.lower() for label in labels]) for word in query.lower().split()]
    return (lambda *rank: all(fits(*rank) for fits in tests)) if tests else None


def _fit(word: str, labels: Sequence[str]) -> Fits:
    if word in WORST_FIRST:
        return lambda record, point, index, host: record["state"] == word
    coordinate = _COORDINATE.fullmatch(word)
    if coordinate is not None and coordinate[1] in labels and (coordinate[2] or coordinate[3]):
        dim, begin = labels.index(coordinate[1]), int(coordinate[2] or 0)
        end = (int(coordinate[4]) if coordinate[4] else float("inf")) if coordinate[3] else begin + 1
        return lambda record, point, index, host: begin <= point[dim] < end
    ranks = _RANKS.fullmatch(word)
    if ranks is not None:
        first, last = int(ranks[1]), int(ranks[2] or ranks[1])
        return lambda record, point, index, host: first <= index <= last
    measured = _MEASURED.fullmatch(word)
    if measured is not None:
        field, limit = measured[1], float(measured[3]) * _SCALES[measured[4] or ""]
        if measured[2] == ">":
            return lambda record, point, index, host: _measure(record, field, -math.inf) > limit
        return lambda record, point, index, host: _measure(record, field, math.inf) < limit
    return lambda record, point, index, host: (
        word in host.lower()
        or word in str(record.get("endpoint", "")).lower()
        or word in str(record.get("detail", "")).lower()
    )


def _measure(record: Mapping[str, object], field: str, unknown: float) -> float:
    value = record.get(field)
    return value if isinstance(value, int | float) else unknown
