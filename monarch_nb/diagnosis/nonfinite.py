"""`watch(mesh)`: the origin of the first NaN among all ranks of a mesh."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from monarch_nb.diagnosis.findings import Finding, names_of
from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, RankWatch, state_of
from monarch_nb.runtime import proc_state_of
from monarch_nb.shape import MeshTrait, Region
from monarch_nb.wire import kind_of

if TYPE_CHECKING:
    from monarch_nb.diagnosis.nonfinite_rank import NonFinite
    from monarch_nb.diagnosis.tensor_allocations import Issued, IssuedOperations, Joined, Sent

Findings: TypeAlias = "tuple[NonFinite | None, NonFinite | None]"

END_S = 10.0  # for a rank to send its findings


class ValueWatch:
    """Watches the operations of PyTorch that ranks of a mesh run, while it is entered, for results that are not finite.

    `findings` are set on exit: the operations that first gave a NaN, the earliest first; else, where numbers have only
    become infinite, one finding that is not sure. `notes` say which ranks could not be watched.
    """

    def __init__(self, mesh: AnyMesh | MeshTrait, *, stop: bool = False) -> None:
        self._operations: IssuedOperations | None = None
        self._in_order: Callable[[], AbstractContextManager[None]] = nullcontext
        self._watched: Callable[[], Sequence[AnyMesh]]
        if isinstance(mesh, ActorMesh | ProcMesh):
            watched: AnyMesh = mesh
            self._watched = lambda: [watched]
        else:
            tensors: Any = mesh  # a mesh of sharded tensors, whose module this one does not import
            watched = tensors.workers
            self._operations, self._in_order = operations_on(tensors.observe), tensors.in_order
            self._watched = lambda: cast("Sequence[AnyMesh]", tensors.executors)
        self._procs = proc_state_of(state_of(watched))
        self._ranks: dict[str, RankWatch[Findings]] = {}  # by actor mesh, of which each runs a thread
        self._beginning = threading.Lock()
        self._stop = stop
        self.findings: tuple[Finding, ...] = ()
        self.notes: list[str] = []

    def __enter__(self) -> "ValueWatch":
        """Begins on all ranks after the endpoints or cells that they run now. Blocks until then.

        Raises RuntimeError where PyTorch is not installed.
        """
        if self._operations is not None:
            self._operations.begin(self._begin_everywhere)
        try:
            with self._in_order():
                self._begin_everywhere()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends on all ranks, and adds the first finding to an error that the watched code raised."""
        try:
            with self._in_order():
                results = self._end()
        finally:
            if self._operations is not None:
                self._operations.end()
        if self._operations is not None:
            located = self._operations.located
            results = [(rank, (located(nan), located(inf))) for rank, (nan, inf) in results]
        self.findings = judge_values(self._procs.name, self._procs.region, results)
        if error is not None and self.findings:
            error.add_note(f"Before that, {self.findings[0].text}")

    def _begin_everywhere(self) -> None:
        """Begins on each actor mesh that is not watched yet; a new stream of tensors adds one. Blocks."""
        with self._beginning:
            for mesh in self._watched():
                ranks: RankWatch[Findings] = RankWatch(
                    mesh, "monarch_nb.diagnosis.nonfinite_rank.FirstNan", last="self" if self._operations else ""
                )
                if ranks.state.uid not in self._ranks:
                    ranks.begin(self._stop)
                    self._ranks[ranks.state.uid] = ranks

    def _end(self) -> "list[tuple[int, Findings]]":
        """Ends on all ranks. Returns their findings, by base rank and thread."""
        if self._operations is not None:
            self._operations.end()
        results = list[tuple[int, Findings]]()
        for ranks in self._ranks.values():
            of_ranks, notes = ranks.end(END_S, "what it has found")
            results += of_ranks.items()
            self.notes += notes
        return results

    def __str__(self) -> str:
        lines = [finding.line for finding in self.findings]
        return "\n".join([*(lines or ["no NaN was found"]), *self.notes])

    __repr__ = __str__


def operations_on(observe: "Callable[[Issued | None, Sent, Joined], None]") -> "IssuedOperations":
    """Returns the recorder of the lines that issue the operations of a mesh of sharded tensors."""
    from monarch_nb.diagnosis.tensor_allocations import (
        IssuedOperations,  # imports PyTorch, which such a mesh has imported
    )

    return IssuedOperations(observe)


def judge_values(mesh: str, region: Region, results: "Collection[tuple[int, Findings]]") -> tuple[Finding, ...]:
    """Returns the findings from the first NaN and the first infinity of each thread of each rank. Pure.

    A NaN that a rank received with the inputs of an operation is reported only if no operation on any rank made one,
    and then only the first.
    """
    nans = [(rank, nan, inf) for rank, (nan, inf) in results if nan is not None]
    origins = [entry for entry in nans if entry[1].given != "nan"]
    if not origins and nans:
        earliest = min(nans, key=lambda entry: entry[1].at)[1]
        origins = [entry for entry in nans if _signature(entry[1]) == _signature(earliest)]
    groups: dict[tuple[object, ...], list[tuple[int, NonFinite, NonFinite | None]]] = {}
    for entry in sorted(origins, key=lambda entry: entry[1].at):
        groups.setdefault(_signature(entry[1]), []).append(entry)
    findings = [
        Finding(
            "nonfinite", mesh, _ranks(group), _text(_named(region, group), group[0][1], group[0][2]), group[0][1].source
        )
        for group in groups.values()
    ]
    if not findings:
        infinities = sorted(((rank, inf, None) for rank, (_, inf) in results if inf), key=lambda entry: entry[1].at)
        if infinities:
            first = [entry for entry in infinities if _signature(entry[1]) == _signature(infinities[0][1])]
            text = _text(_named(region, first), first[0][1], None)
            findings.append(Finding("nonfinite", mesh, _ranks(first), text, first[0][1].source, sure=False))
    return tuple(findings)


def _signature(event: "NonFinite") -> tuple[object, ...]:
    return event.operation, event.source, event.backward, event.call


def _ranks(group: "Sequence[tuple[int, NonFinite, NonFinite | None]]") -> tuple[int, ...]:
    return tuple(sorted({rank for rank, _, _ in group}))


def _named(region: Region, group: "Sequence[tuple[int, NonFinite, NonFinite | None]]") -> str:
    return names_of(region, _ranks(group))


def _text(ranks: str, event: "NonFinite", inf: "NonFinite | None") -> str:
    call = f"in call {event.call} of {event.endpoint}() " if event.endpoint else ""
    return f"{ranks}: {call}{event.text(inf)}"


def has_sharded_tensors(mesh: object) -> bool:
    """Returns whether a value is a mesh of sharded tensors."""
    return isinstance(mesh, MeshTrait) and hasattr(mesh, "in_order")


def watch(mesh: AnyMesh | MeshTrait, *, stop: bool = False) -> ValueWatch:
    """Finds where the first NaN comes from: `with watch(trainers) as found: ...`, then `found.findings`.

    On each rank of an actor mesh, of a mesh of sharded tensors, or for cells on processes, every operation of PyTorch
    is checked until one gives a NaN, and the parameters after each step of an optimizer: a small step takes half as
    much again. A finding has the rank, the operation, the module, the line (of sharded tensors, that which issued it),
    forward or backward, and whether the inputs were finite. With `stop`, the debugger stops the rank of an actor there.
    Raises TypeError for a value that is not a mesh, ValueError for `stop` with sharded tensors.
    """
    if not isinstance(mesh, ActorMesh | ProcMesh):
        if not has_sharded_tensors(mesh):
            raise TypeError(f"watch() takes a mesh of actors, of processes or of sharded tensors, not {kind_of(mesh)}")
        if stop:
            raise ValueError("watch(..., stop=True) is for actors: the program that uses sharded tensors runs here")
    return ValueWatch(mesh, stop=stop)
