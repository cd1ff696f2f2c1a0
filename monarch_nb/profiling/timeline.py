"""Traces of several ranks as one, in Chrome's JSON, which Perfetto opens. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

APART = 1000  # numbers of processes for each rank
_FLOWS = frozenset({"s", "t", "f", "b", "n", "e"})  # phases of events that belong together by an id


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank, as PyTorch writes it. `ahead` is how many seconds its host's clock is ahead of ours."""

    rank: int
    label: str
    document: Mapping[str, Any]
    ahead: float = 0.0


def timeline(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """One document: the processes of each rank under its label, in the order of ranks, at the same zero of time.

    PyTorch writes microseconds since `baseTimeNanoseconds` of the host's clock.
    """
    every = sorted(traces, key=lambda trace: trace.rank)
    bases = [_base(trace.document) - 1e6 * trace.ahead for trace in every]
    zero = min(bases, default=0.0)
    events: list[dict[str, Any]] = []
    for trace, base in zip(every, bases, strict=True):
        events += _moved(trace, base - zero)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(1000 * zero), "traceEvents": events}


def _base(document: Mapping[str, Any]) -> float:
    """Microseconds since the epoch that its times count from."""
    return float(document.get("baseTimeNanoseconds", 0)) / 1000


def _moved(trace: RankTrace, later: float) -> list[dict[str, Any]]:
    processes: dict[Any, int] = {}
    moved = []
    for event in trace.document.get("traceEvents", ()):
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue  # every process has a name of ours
        changed = dict(event)
        if "pid" in event:
            changed["pid"] = processes.setdefault(event["pid"], APART * (trace.rank + 1) + len(processes))
        if "ts" in event:
            changed["ts"] = event["ts"] + later
        if "id" in event and event.get("ph") in _FLOWS:
            changed["id"] = f"{trace.rank}.{event['id']}"
        moved.append(changed)
    return [*_names(trace, processes), *moved]


def _names(trace: RankTrace, processes: Mapping[Any, int]) -> list[dict[str, Any]]:
    names: dict[Any, str] = {
        event["pid"]: str(event.get("args", {}).get("labels", ""))
        for event in trace.document.get("traceEvents", ())
        if event.get("ph") == "M" and event.get("name") == "process_labels"
    }
    found = []
    for number, (pid, ours) in enumerate(processes.items()):
        what = names.get(pid, "") or ("" if isinstance(pid, int) else str(pid))
        name = f"{trace.label} {what}".rstrip()
        found.append({"ph": "M", "name": "process_name", "pid": ours, "args": {"name": name}})
        order = {"sort_index": APART * trace.rank + number}
        found.append({"ph": "M", "name": "process_sort_index", "pid": ours, "args": order})
    return found
