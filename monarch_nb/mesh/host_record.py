"""The record that all handles of one host mesh share: its hosts, their source, and how they grow and shrink."""

import operator
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from monarch_nb.runtime import Future, error_of, resolved_future, when_done
from monarch_nb.shape import Region, places_of, region_of_ranks
from monarch_nb.wire import counted, host_name

_LOADED_S = 5.0  # for the hosts of a loaded job, where its written record is enough
GROW_S = 600.0  # how long requested hosts are waited for


class Fate(NamedTuple):
    """The fate of a host that cannot be reached, according to the starter of its agent."""

    ended: bool  # it does not return
    description: str  # for people


class HostSource(Protocol):
    """The source of a mesh's hosts, which also takes them back: a job. Its methods block."""

    def more(
        self, target: "int | Sequence[str]", timeout: float, *, instead: Sequence[str] = ()
    ) -> tuple[str, ...]:  # fmt: skip
        """Returns the ids of this number of new, usable hosts, or of the hosts on these machines.

        They are appended, or take the places of the lost hosts in `instead`.
        Raises NoMoreHostsError: then none has arrived.
        """

    def fate(self, hosts: Sequence[str]) -> dict[str, Fate]:
        """Returns the fate of lost hosts according to its engine; blocks for some seconds at most.

        Raises NoMoreHostsError where the engine does not answer within that time.
        """

    def give_back(self, hosts: Sequence[str]) -> None:
        """Takes back hosts that are not used any more, or are dead."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The ids of spare hosts that can be used now; does not block."""

    def take_spares(self, dead: Sequence[str]) -> dict[str, str]:
        """Assigns spares to as many of these hosts as possible, at once; returns the spare by lost host."""

    def refill(self) -> None:
        """Requests missing spares; does not block."""

    def key_file(self, force: bool) -> Path | None:
        """Returns the file here with its hosts' key, if any. Raises TrustError while some are late, unless `force`."""

    def key_changed(self) -> None:
        """Notes that the key file has another key, which hosts started from now on need. Raises RuntimeError."""

    def written(self) -> str:
        """Returns the text from which another process that gets the mesh makes such a source; "" where it cannot."""

    def __str__(self) -> str:
        """Returns its name for people."""


class RecordedSource:
    """The source of a mesh's hosts as another process has written it down; opened at its first use."""

    def __init__(self, name: str, text: str, opens: Callable[[str], HostSource]) -> None:
        """`opens` makes a source of the written text; it raises NoMoreHostsError."""
        self._name, self._text, self._opens = name, text, opens
        self._lock = threading.Lock()
        self._source: HostSource | None = None

    def opened(self) -> HostSource:
        """Returns the source itself. Blocks for some seconds at first. Raises NoMoreHostsError."""
        with self._lock:
            if self._source is None:
                self._source = self._opens(self._text)
            return self._source

    def more(
        self, target: "int | Sequence[str]", timeout: float, *, instead: Sequence[str] = ()
    ) -> tuple[str, ...]:  # fmt: skip
        """Returns the ids of new hosts."""
        return self.opened().more(target, timeout, instead=instead)

    def fate(self, hosts: Sequence[str]) -> dict[str, Fate]:
        """Returns the fate of lost hosts according to its engine."""
        return self.opened().fate(hosts)

    def give_back(self, hosts: Sequence[str]) -> None:
        """Takes back hosts that are not used any more, or are dead."""
        self.opened().give_back(hosts)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The ids of spare hosts that can be used now; none before the source was opened."""
        return () if self._source is None else self._source.waiting

    def take_spares(self, dead: Sequence[str]) -> dict[str, str]:
        """Assigns spares to as many of these hosts as possible; returns the spare by lost host."""
        return self.opened().take_spares(dead)

    def refill(self) -> None:
        """Requests missing spares."""
        self.opened().refill()

    def key_file(self, force: bool) -> Path | None:
        """Returns the file with the key of its hosts on this machine."""
        return self.opened().key_file(force)

    def key_changed(self) -> None:
        """Notes that the key file has another key."""
        self.opened().key_changed()

    def written(self) -> str:
        """Returns the recorded text."""
        return self._text if self._source is None else self._source.written()

    def __str__(self) -> str:
        return self._name


class NoMoreHostsError(RuntimeError):
    """No source has another host for a mesh, or none in time; the text names the source, and a remedy."""


class HostRecord:
    """One host mesh. `ids` keep their positions for its lifetime: slices refer to hosts by them."""

    def __init__(
        self, name: str, ids: "Sequence[str] | Future[tuple[str, ...]]", region: Region, ended: list[str] | None,
        identity: str, source: HostSource | None,
    ) -> None:  # fmt: skip
        self.name = name
        self.ids = ids if isinstance(ids, Future) else resolved_future(tuple(ids))
        when_done(self.ids, _name)
        self.region = region
        self.ended = [] if ended is None else ended  # why it cannot be used any more
        self.identity = identity or uuid.uuid4().hex
        self.source = source
        self.instead: dict[str, str] = {}  # lost host -> the host that has replaced it
        self.changing = threading.Lock()  # held while hosts are added or removed
        self.replacing = threading.Lock()  # held while one of its hosts replaces another
        self._lock = threading.Lock()
        _records.add(self)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The ids of its hosts. Blocks until they have arrived."""
        ids = self.ids.get()
        return tuple(ids[rank] for rank in self.region.ranks())

    def take(self, hosts: Sequence[str]) -> None:
        """Adds these hosts."""
        with self._lock:
            ids = self.ids.get()
            ranks = (*self.region.ranks(), *range(len(ids), len(ids) + len(hosts)))
            self.ids, self.region = resolved_future((*ids, *hosts)), self._line(ranks)
        _name(self.ids)

    def drop(self, hosts: Collection[str]) -> None:
        """Removes these hosts."""
        with self._lock:
            ids = self.ids.get()
            self.region = self._line([rank for rank in self.region.ranks() if ids[rank] not in hosts])

    def swap(self, dead: str, host: str) -> None:
        """Replaces a dead host by another one."""
        with self._lock:
            self.ids = resolved_future(tuple(host if old == dead else old for old in self.ids.get()))
            self.instead[dead] = host
        _name(self.ids)

    def places(self, hosts: Collection[str]) -> str:
        """Returns some of its hosts as text: "hosts=1-2"."""
        ids = self.ids.get()
        return places_of(self.region, [rank for rank in self.region.ranks() if ids[rank] in hosts])

    def giver(self, operation: str) -> HostSource:
        """Returns the source of its hosts. Raises NoMoreHostsError."""
        if self.source is None:
            raise NoMoreHostsError(
                f"{self.name} cannot {operation}: its hosts were attached one by one, and no job gives others. Attach "
                "more hosts, and name them: mesh.grow(hosts=attach_to_workers(…)); or have the hosts from a job"
            )
        return self.source

    def _line(self, ranks: Sequence[int]) -> Region:
        return region_of_ranks(self.region.labels, [len(ranks)], ranks)


def _name(ids: Future[tuple[str, ...]]) -> None:
    """Names hosts in their order, before messages from them arrive."""
    if error_of(ids) is None:
        for host in ids.get(0):
            host_name(host)


_records: "weakref.WeakSet[HostRecord]" = weakref.WeakSet()


def giver_of(host: str) -> str:
    """Returns the name of the source that can replace a host; "" without one."""
    for record in tuple(_records):
        is_usable = record.source is not None and not record.ended and record.ids.done()
        if is_usable and record.ids.exception(0) is None and host in record.ids.get(0):
            return str(record.source)
    return ""


def record_with(identity: str, hosts: Collection[str], timeout: float = 0.0) -> HostRecord | None:
    """Returns the host mesh that has this identity, or else one of a job that has provided any of these hosts.

    If there is none, waits up to `timeout` seconds for the hosts of jobs that are still arriving.
    """
    until, match = time.monotonic() + timeout, _record_with(identity, hosts)
    for record in tuple(_records):
        is_recorded = match is not None and isinstance(match.source, RecordedSource)
        is_pending = record.source is not None and not record.ended and not record.ids.done()
        if is_pending and (match is None or is_recorded):
            remaining = max(0.0, until - time.monotonic())
            record.ids.exception(min(remaining, _LOADED_S) if is_recorded else remaining)
            match = _record_with(identity, hosts)
    return match


def _record_with(identity: str, hosts: Collection[str]) -> HostRecord | None:
    records = [record for record in tuple(_records) if not record.ended and record.ids.done()]
    same = [record for record in records if record.identity == identity]
    if same and not all(isinstance(record.source, RecordedSource) for record in same):
        return max(same, key=lambda record: record.source is not None)  # references have none
    with_source = [record for record in records if record.source is not None and record.ids.exception(0) is None]
    matches = [record for record in with_source if not set(record.hosts).isdisjoint(hosts)]
    # A job that this process has loaded itself is preferred to a record from another process.
    return next((match for match in matches if not isinstance(match.source, RecordedSource)), same[0] if same else None)


class Resized(Struct, frozen=True):
    """A change of a mesh to more hosts, or fewer; shown as one line."""

    mesh: str
    sizes: dict[str, int]  # of the mesh now
    hosts: tuple[str, ...]  # ids of the added or removed hosts
    actors: tuple[str, ...] = ()  # names of the meshes whose actors were created there, or have ended
    removed: str = ""  # the coordinates that the hosts had: "hosts=2"; empty for a mesh that grew
    freed: tuple[str, ...] = ()  # hosts that were returned to their job

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        count = f"{counted(len(self.hosts), 'host')}"
        names = f" ({', '.join(map(host_name, self.hosts))})" if len(self.hosts) <= 4 else ""
        actors = ", ".join(self.actors)
        if not self.removed:
            created = f", with {actors} created there" if actors else ""
            return f"<{self.mesh!r} {{{shape}}}: {count} more{names}{created}>"
        ended = f", with the actors of {actors} there" if actors else ""
        freed = len(self.freed)
        returned = f"; {counted(freed, 'host')} returned to {'its' if freed == 1 else 'their'} job" if freed else ""
        return f"<{self.mesh!r} {{{shape}}}: {self.removed} removed{names}{ended}{returned}>"


def more_of(more: Mapping[str, object], label: str, name: str) -> object:
    """Returns what `grow(hosts=2)` requests along the dimension of hosts: a number, or names. Raises ValueError."""
    target = _along(more, label, name, f"grow({label}=2)")
    if isinstance(target, (list, tuple)):
        if not target or not all(isinstance(host, str) and host for host in target) or len({*target}) < len(target):
            raise ValueError(f"{name}.grow({label}={target!r}): name machines, each once: {label}=['node7']")
        return tuple(target)
    if isinstance(target, int) and (isinstance(target, bool) or target < 1):
        raise ValueError(f"{name}.grow({label}={target!r}): say how many more, at least 1; shrink() removes hosts")
    return target


def leaving_positions(fewer: Mapping[str, object], label: str, name: str, hosts: Sequence[str]) -> list[int]:
    """Returns the positions, among hosts, that `shrink(hosts=-1)` or `hosts=[1]` means. Raises ValueError."""
    target = _along(fewer, label, name, f"shrink({label}=-1)")
    if isinstance(target, int) and not isinstance(target, bool) and target < 0:
        return list(range(max(0, len(hosts) + target), len(hosts)))
    if isinstance(target, (str, int)) or not isinstance(target, Sequence) or not target:
        raise ValueError(
            f"{name}.shrink({label}={target!r}): say {label}=-1 for the last one, {label}=[1] for that one, or name "
            f"the hosts: {label}=[{host_name(hosts[-1])!r}]"
        )
    names = [host_name(host) for host in hosts]
    positions: list[int] = []
    for entry in target:
        position = hosts.index(entry) if entry in hosts else names.index(entry) if entry in names else entry
        if isinstance(position, (str, bool)) or not 0 <= operator.index(position) < len(hosts):
            raise ValueError(f"{name} has no host {position!r}: it has {len(hosts)}, {', '.join(names[:8])}")
        positions.append(position)
    return sorted(set(positions))


def _along(dims: Mapping[str, object], label: str, name: str, example: str) -> object:
    if list(dims) != [label]:
        labels = ", ".join(dims) or "nothing"
        raise ValueError(f"{name} grows and shrinks along {label!r} alone, got {labels}: {name}.{example}")
    return dims[label]
