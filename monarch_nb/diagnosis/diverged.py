"""`compare_replicas(mesh)` and `ReplicaWatch`: which ranks' parameters differ from the rest, and since when."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from monarch_nb.diagnosis.findings import Diagnosis, Finding, by_certainty, names_of
from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, RankWatch, reason_of, run_on_each, state_of, values_or_errors
from monarch_nb.runtime import MeshState, proc_state_of
from monarch_nb.shape import Region, places_of
from monarch_nb.wire import counted, kind_of

if TYPE_CHECKING:
    from monarch_nb.diagnosis.diverged_rank import ReplicaHistory, TensorSum

DEFAULT_TIMEOUT_S = 60.0
_RANK = "monarch_nb.diagnosis.diverged_rank"
_CALL = f"__import__({_RANK!r}, fromlist=['tensor_sums']).tensor_sums({{holder}})"


# -- now ---------------------------------------------------------------------------------------------------------------


def compare_replicas(mesh: "ActorMesh[Any] | ProcMesh", timeout: float = DEFAULT_TIMEOUT_S) -> Diagnosis:
    """Finds out which ranks' parameters, or states of their optimizers, differ from the rest.

    Each rank of an actor mesh sums up the tensors of its modules and optimizers, those in its attributes and in lists
    and dicts there; for a mesh of processes, those of cells. Parameters in DistributedDataParallel, and distributed
    tensors by their placements, are to be equal; for other modules, buffers, and the states of PyTorch's generators of
    random numbers it is a suspicion (`sure` is False), where most ranks are equal. Runs between the calls of the
    actors, and blocks until these have ended, for up to `timeout` seconds. Raises TypeError for a value that is not a
    mesh of actors or of processes, ValueError for a `timeout` that is not positive.
    """
    if not isinstance(mesh, (ActorMesh, ProcMesh)):
        raise TypeError(f"compare_replicas() takes a mesh of actors or of processes, not {kind_of(mesh)}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} is not a positive number of seconds")
    source = _CALL.format(holder=_holder(mesh))
    state: MeshState = state_of(mesh)
    procs = proc_state_of(state)
    requests = run_on_each(mesh, source, filename="<replicas>")
    by_rank: dict[int, list[TensorSum]] = {}
    silent: dict[str, list[int]] = {}
    for rank, answer in values_or_errors(requests, timeout).items():
        if isinstance(answer, Exception):
            silent.setdefault(reason_of(answer), []).append(rank)
        else:
            by_rank[rank] = answer
    tensors = len({(tensor.path, tensor.part) for sums in by_rank.values() for tensor in sums})
    notes = [f"{counted(tensors, 'tensor')} on {counted(len(by_rank), 'rank')} of {state.name}"]
    notes += [f"{places_of(procs.region, ranks) or 'it'} did not answer: {error}" for error, ranks in silent.items()]
    return Diagnosis(judge_sums(procs.name, procs.region, by_rank), "; ".join(notes))


def _holder(mesh: AnyMesh) -> str:
    return "self" if isinstance(mesh, ActorMesh) else "globals()"


def judge_sums(mesh: str, region: Region, by_rank: "Mapping[int, Sequence[TensorSum]]") -> tuple[Finding, ...]:
    """Returns findings about ranks whose tensors differ from the majority's, the certain ones first. Pure.

    Without a majority all ranks are named, if the tensors are to be equal. Tensors that need not be equal are compared
    only where most ranks have the same ones: else each rank has a part of its own.
    """
    tensors: dict[tuple[str, str], dict[int, TensorSum]] = {}
    for rank, sums in by_rank.items():
        for tensor in sums:
            tensors.setdefault((tensor.path, tensor.part), {})[rank] = tensor
    groups: dict[tuple[tuple[int, ...], bool, bool], list[dict[int, TensorSum]]] = {}
    for ranks in tensors.values():
        (common, count), *rarer = Counter(tensor.checksum for tensor in ranks.values()).most_common()
        if not rarer:
            continue
        is_replica = all(tensor.is_replica for tensor in ranks.values())
        has_majority = 2 * count > len(ranks)
        if is_replica or has_majority:
            named = [rank for rank, tensor in ranks.items() if not has_majority or tensor.checksum != common]
            groups.setdefault((tuple(sorted(named)), is_replica, has_majority), []).append(ranks)
    findings = [
        Finding("diverged", mesh, named, _text(region, named, differing, len(tensors), has_majority), sure=is_replica)
        for (named, is_replica, has_majority), differing in groups.items()
    ]
    return by_certainty(findings)


def _text(
    region: Region,
    named: Sequence[int],
    differing: "Sequence[Mapping[int, TensorSum]]",
    tensors: int,
    has_majority: bool,
) -> str:
    first = differing[0]
    path = next(iter(first.values())).path
    names = names_of(region, named)
    count = f"{len(differing)} of {counted(tensors, 'tensor')}"
    if not has_majority:
        norms = _norms(first.values())
        return f"{names} have different values in {count}, first in {path}{f' (norms {norms})' if norms else ''}"
    mine = _norms(tensor for rank, tensor in first.items() if rank in named)
    theirs = _norms(tensor for rank, tensor in first.items() if rank not in named)
    has, norms = "has" if len(named) == 1 else "have", f" (norm {mine}, elsewhere {theirs})" if mine else ""
    return f"{names} {has} other values than the rest in {count}, first in {path}{norms}"


def _norms(sums: "Iterable[TensorSum]") -> str:
    norms = {f"{tensor.norm:.6g}": None for tensor in sums if not math.isnan(tensor.norm)}
    return ", ".join([*norms][:4]) + (", …" if len(norms) > 4 else "")


# -- during a watch ----------------------------------------------------------------------------------------------------


class ReplicaWatch:
    """Compares replicas after steps of an optimizer while it is entered; `diagnosis` is set on exit.

    Each rank sums up its parameters and optimizer states, as `compare_replicas` does, after every `every` steps of the
    first optimizer that its actor, or its cells, use; in long runs less and less often, 128 times at most. A finding
    says since which step ranks have differed. Raises TypeError for a value that is not a mesh of actors or of
    processes, ValueError if `every` is not positive.
    """

    def __init__(self, mesh: AnyMesh, every: int = 1) -> None:
        if not isinstance(mesh, ActorMesh | ProcMesh):
            raise TypeError(f"ReplicaWatch() takes a mesh of actors or of processes, not {kind_of(mesh)}")
        if every < 1:
            raise ValueError(f"every={every} is not a positive number of steps")
        self._every = every
        self._ranks: RankWatch[ReplicaHistory] = RankWatch(mesh, f"{_RANK}.ReplicaSums", last=_holder(mesh))
        self.diagnosis = Diagnosis((), "nothing yet")

    def __enter__(self) -> "ReplicaWatch":
        """Begins on all ranks after the endpoints or cells that they run now. Blocks until then.

        Raises RuntimeError where PyTorch is not installed.
        """
        self._ranks.begin(self._every)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends on all ranks, compares their sums, and adds the first finding to an error of the watched code."""
        histories, notes = self._ranks.end(DEFAULT_TIMEOUT_S, "what it had")
        steps = max((history.readings[-1].step for history in histories.values()), default=0)
        text = f"{counted(len(histories), 'rank')} of {self._ranks.state.name} in {counted(steps, 'step')}"
        findings = judge_histories(self._ranks.procs.name, self._ranks.procs.region, histories)
        self.diagnosis = Diagnosis(findings, "; ".join([text, *notes]))
        if error is not None and findings:
            error.add_note(f"Before that, {findings[0].text}")

    def __str__(self) -> str:
        return str(self.diagnosis)

    __repr__ = __str__


def judge_histories(mesh: str, region: Region, histories: "Mapping[int, ReplicaHistory]") -> tuple[Finding, ...]:
    """Returns findings about the ranks that differ at the first step at which any do. Pure."""
    readings = {rank: {reading.step: reading for reading in history.readings} for rank, history in histories.items()}
    common = sorted(set[int].intersection(*map(set, readings.values()))) if readings else []
    before: int | None = None
    for step in common:
        sums = {rank: history.sums(readings[rank][step]) for rank, history in histories.items()}
        findings = judge_sums(mesh, region, sums)
        if findings:
            since = f"after step {step}" if step else "before the first step"
            equal = f"; after step {before} they were equal" if before else ""
            return tuple(replace(finding, text=f"{since}, {finding.text}{equal}") for finding in findings)
        before = step
    return ()
