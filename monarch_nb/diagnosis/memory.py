"""`compare_memory(mesh)` and `MemoryWatch`: which ranks use more memory than others, where it grows, and for what."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from monarch_nb.code.modules import line_name
from monarch_nb.diagnosis.collector import answers_of, merged, meshes_of
from monarch_nb.diagnosis.findings import Diagnosis, Finding, by_certainty, names_of
from monarch_nb.diagnosis.nonfinite import has_sharded_tensors, operations_on
from monarch_nb.diagnosis.verbs import MEMORY, AskMemory, GpuMemory, ProcessMemory
from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, RankWatch
from monarch_nb.runtime import ProcState, current_runtime
from monarch_nb.runtime.tensor_memory import LivingTensors, PeakMemory, PeakPart, lines_of, summed
from monarch_nb.shape import MeshTrait
from monarch_nb.wire import counted, host_of, kind_of, size_text

if TYPE_CHECKING:
    from monarch_nb.diagnosis.memory_rank import Growth, MemoryGrowth
    from monarch_nb.diagnosis.tensor_allocations import IssuedOperations, Origin

Names: TypeAlias = Callable[[Iterable[int]], str]

ANSWER_S = 30.0  # for a rank to count its tensors, or to end a watch
MUCH, MORE = 64 << 20, 1.5  # bytes, and times the median of the others, by which a named rank uses more
SCARCE = 0.05  # of the memory of a host or a GPU that is left
GROWN = 1 << 20  # bytes by which a line's allocations grow, before it is named
RESIDENT_GROWN = 32 << 20  # the same of a whole process
CLEAR = 0.5  # of the growth that one line accounts for
MANY = 8  # allocations before a finding about a line is sure


# -- now ---------------------------------------------------------------------------------------------------------------


def compare_memory(
    mesh: "ActorMesh[object] | ProcMesh | MeshTrait | None" = None, timeout: float = ANSWER_S
) -> Diagnosis:
    """Finds out which ranks use more memory than others, and which hosts have next to none left.

    Each process of a mesh, or without one of all meshes with calls under way, reads its memory and counts the tensors
    that live there, also while calls run, which delays its program by up to a tenth of a second. That a rank uses
    more is a suspicion. Growth is found by `MemoryWatch`. Blocks for up to `timeout` seconds. Raises TypeError for
    a value that is not a mesh, ValueError for a `timeout` that is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} is not a positive number of seconds")
    runtime = current_runtime()
    diagnoses = []
    for procs, uses in answers_of(runtime, meshes_of(runtime, mesh), MEMORY, AskMemory(), timeout):
        hosts = {rank: host_of(procs.address(rank)) for rank in uses}
        findings = judge_memory(procs.name, uses, hosts, partial(names_of, procs.region))
        diagnoses.append(Diagnosis(findings, _inspected(procs, uses)))
    return merged(diagnoses)


def judge_memory(
    mesh: str, uses: Mapping[int, ProcessMemory], hosts: Mapping[int, str], names: Names
) -> tuple[Finding, ...]:
    """Returns findings about ranks that use much more than the others, or whose host has little memory left. Pure."""
    findings = []
    for host in dict.fromkeys(hosts.values()):
        ranks = [rank for rank in uses if hosts[rank] == host]
        use = uses[ranks[0]]
        if use.limit and use.free < SCARCE * use.limit:
            remaining = f"host {host} has {size_text(use.free)} of {size_text(use.limit)} left"
            used = size_text(sum(uses[rank].used for rank in ranks))
            text = f"{names(ranks)} {'uses' if len(ranks) == 1 else 'use'} {used}; {remaining}"
            findings.append(Finding("memory", mesh, tuple(ranks), text))
    findings += _full_gpus(mesh, uses, hosts, names)
    for rank, use in uses.items():
        peers = [peer for peer in uses if peer != rank]
        if not peers:
            break
        usual = median(uses[peer].used for peer in peers)
        if use.used >= max(MORE * usual, usual + MUCH):
            text = f"{names([rank])} uses {size_text(use.used)}, the others {size_text(usual)}"
            if more := _more_tensors(use, [uses[peer] for peer in peers], use.used - usual):
                text += f"; {more}"
            findings.append(Finding("memory", mesh, (rank,), text, sure=False))
    return by_certainty(findings)


def _full_gpus(
    mesh: str, uses: Mapping[int, ProcessMemory], hosts: Mapping[int, str], names: Names
) -> Iterable[Finding]:
    """Yields findings about GPUs with next to no memory left; ranks that share a GPU report the same."""
    by_gpu: dict[tuple[str, int, int], dict[int, GpuMemory]] = {}
    for rank, use in uses.items():
        if use.gpu is not None and use.gpu.total - use.gpu.used < SCARCE * use.gpu.total:
            by_gpu.setdefault((hosts[rank], use.gpu.used, use.gpu.total), {})[rank] = use.gpu
    for (host, used, total), gpus in by_gpu.items():
        subject = f"{names(gpus)}: {'its' if len(gpus) == 1 else 'their'} GPU on host {host}"
        text = f"{subject} has {size_text(total - used)} of {size_text(total)} left"
        if all(gpu.own >= 0 for gpu in gpus.values()):
            own = sum(gpu.own for gpu in gpus.values())
            text += f"; {size_text(own)} are in use by {'it' if len(gpus) == 1 else 'them'}"
            text += f", {size_text(used - own)} by other processes" if used - own > total // 100 else ""
        yield Finding("memory", mesh, tuple(gpus), text)


def _more_tensors(use: ProcessMemory, peers: Sequence[ProcessMemory], more: float) -> str:
    """Names the tensors of which a rank has more than the others, if they make up most of the difference."""
    for group in use.tensors:
        theirs = median(
            sum(alike.size for alike in peer.tensors if (alike.what, alike.device) == (group.what, group.device))
            for peer in peers
        )
        if group.device == "cpu" and group.size - theirs >= CLEAR * more:
            tensors = f"{counted(group.count, 'tensor')} {group.what}"
            return f"{tensors} take {size_text(group.size)}, elsewhere {size_text(theirs)}"
    return ""


def _inspected(procs: ProcState, uses: Mapping[int, ProcessMemory]) -> str:
    text = f"{counted(len(uses), 'process')} of {procs.name}"
    if uses:
        peak = size_text(max(use.peak for use in uses.values()))
        text += f", each with {_range([use.used for use in uses.values()])} (at most {peak} so far)"
        if cuda := [use for use in uses.values() if use.reserved or use.gpu is not None]:
            text += f", on GPUs {_on_gpus(cuda)}"
        most = max(uses, key=lambda rank: uses[rank].used + uses[rank].cuda)
        if memory := uses[most].held:
            text += f"; the tensors of {names_of(procs.region, [most])}: {', '.join(lines_of(memory))}"
    silent = [rank for rank in procs.region.ndslice if rank not in uses]
    return f"{text}; {names_of(procs.region, silent)} did not answer" if silent else text


def _on_gpus(uses: Sequence[ProcessMemory]) -> str:
    """Returns `2.60 GB (2.00 GB in tensors), busy for 71 % of the time`, or the range over several ranks."""
    tensors = _range([use.cuda for use in uses])
    own = [use.gpu.own for use in uses if use.gpu is not None and use.gpu.own >= 0]
    text = f"{_range(own)} ({tensors} in tensors)" if len(own) == len(uses) else f"{tensors} in tensors"
    shares = sorted(round(100 * use.gpu.share) for use in uses if use.gpu is not None and use.gpu.share >= 0)
    if shares:
        text += f", busy for {'' if shares[0] == shares[-1] else f'{shares[0]} to '}{shares[-1]} % of the time"
    return text


def _range(sizes: Sequence[int]) -> str:
    least, most = size_text(min(sizes)), size_text(max(sizes))
    return least if least == most else f"{least} to {most}"


# -- during a watch ----------------------------------------------------------------------------------------------------


class MemoryWatch:
    """Watches what the ranks of a mesh allocate while it is entered; `diagnosis` and `peaks` are set on exit.

    On each rank of an actor mesh, of a mesh of sharded tensors, or for cells on processes, allocations of PyTorch are
    recorded with their lines, and but for sharded tensors those of Python (by tracemalloc): a small step takes five
    times as long. A finding is about memory that has grown throughout and is still held. `peaks` has, for each base
    rank, the most that its tensors came to on each device, and what they were then: parameters, gradients and states of
    optimizers by name, activations by module, others by line; of sharded tensors, without what streams other than the
    main one allocate meanwhile. Raises TypeError for a value that is no such mesh.
    """

    def __init__(self, mesh: AnyMesh | MeshTrait) -> None:
        self._operations: IssuedOperations | None = None
        self._in_order: Callable[[], AbstractContextManager[None]] = nullcontext
        readings, last = "GrowthReadings", ""
        if isinstance(mesh, ActorMesh | ProcMesh):
            watched: AnyMesh = mesh
        elif has_sharded_tensors(mesh):
            tensors: Any = mesh  # whose module this one does not import
            self._operations, self._in_order = operations_on(tensors.observe), tensors.in_order
            watched, readings, last = tensors.workers, "PeakReadings", "self"
        else:
            raise TypeError(
                f"MemoryWatch() takes a mesh of actors, of processes or of sharded tensors, not {kind_of(mesh)}"
            )
        self._ranks: RankWatch[MemoryGrowth] = RankWatch(
            watched, f"monarch_nb.diagnosis.memory_rank.{readings}", last=last
        )
        self.diagnosis = Diagnosis((), "nothing yet")
        self.peaks: dict[int, tuple[PeakMemory, ...]] = {}

    def __enter__(self) -> "MemoryWatch":
        """Begins on all ranks after the endpoints or cells that they run now. Blocks until then."""
        with self._in_order():
            self._ranks.begin()
        if self._operations is not None:
            self._operations.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends on all ranks, and compares the growth."""
        try:
            with self._in_order():
                growths, notes = self._ranks.end(ANSWER_S, "what grows")
        finally:
            if self._operations is not None:
                self._operations.end()
        seconds = max((growth.seconds for growth in growths.values()), default=0.0)
        mesh = self._ranks.state.name if self._operations is None else self._ranks.procs.name
        text = f"{counted(len(growths), 'rank')} of {mesh} for {seconds:.0f} s"
        grown = [growth.resident.size for growth in growths.values()]
        if grown and self._operations is None:
            text += f"; the largest growth of a process is {size_text(max(0, *grown))}"
        procs = self._ranks.procs
        findings = judge_growth(procs.name, growths, partial(names_of, procs.region))
        self.diagnosis = Diagnosis(findings, "; ".join([text, *notes]))
        named = _namer(self._operations)
        self.peaks = {rank: tuple(map(named, growth.peaks)) for rank, growth in growths.items()}

    @property
    def peak_lines(self) -> list[str]:
        """The highest peak on each kind of device, a line for each kind of memory."""
        by_device: dict[str, tuple[int, PeakMemory]] = {}
        for rank, peaks in self.peaks.items():
            for peak in peaks:
                kind = peak.device.partition(":")[0]
                if kind not in by_device or peak.size > by_device[kind][1].size:
                    by_device[kind] = rank, peak
        lines = []
        for rank, peak in by_device.values():
            location = f" at {line_name(peak.source)}" if peak.source else ""
            owner = f"{names_of(self._ranks.procs.region, [rank])} on {peak.device}"
            lines.append(f"the highest peak of tensors was that of {owner}: {size_text(peak.size)}{location}")
            lines += [f"  {line}" for line in lines_of(summed(part.held for part in peak.parts))]
        return lines

    def __str__(self) -> str:
        return "\n".join([str(self.diagnosis), *self.peak_lines])

    __repr__ = __str__


def _namer(operations: "IssuedOperations | None") -> Callable[[PeakMemory], PeakMemory]:
    """Returns a function that names the parts of a peak; only this process knows the names of sharded tensors."""
    names: dict[tuple[int, int], tuple[str, str]] = {}
    for kind, name, tensor in LivingTensors().named if operations is not None else ():
        reference = getattr(tensor, "reference", None)
        if reference is not None:
            names.setdefault((reference.stream.number, reference.number), (kind, name))

    def origin(issued: tuple[int, int] | None) -> "Origin | None":
        return None if operations is None or issued is None else operations.origin(issued)

    def named_part(part: PeakPart) -> PeakPart:
        kind, name, source = part.held.kind, part.held.name, part.source
        if part.tensor in names:
            kind, name = names[part.tensor]
        elif (site := origin(part.issued)) is not None:
            kind, name, source = site.kind, site.module, "" if site.module else site.source
        memory = msgspec.structs.replace(part.held, kind=kind, name=line_name(source) if source else name)
        return part._replace(held=memory, source="")

    def named(peak: PeakMemory) -> PeakMemory:
        site = origin(peak.issued)
        source = peak.source if site is None else site.source
        return peak._replace(parts=tuple(map(named_part, peak.parts)), source=source)

    return named


def judge_growth(mesh: str, growths: "Mapping[int, MemoryGrowth]", names: Names) -> tuple[Finding, ...]:
    """Returns findings about lines whose allocations grow throughout, with the ranks on which they do. Pure."""
    alike: dict[str, list[tuple[int, MemoryGrowth, Growth, int]]] = {}
    for rank, growth in growths.items():
        growing = [line for line in growth.lines if line.size >= GROWN and is_steady(line.sizes)]
        by_source: dict[str, int] = {}
        for line in growing:
            by_source[line.source] = by_source.get(line.source, 0) + line.size
        source = max(by_source, key=by_source.__getitem__, default=None)
        if source is not None:
            most = max((line for line in growing if line.source == source), key=lambda line: line.size)
            alike.setdefault(source, []).append((rank, growth, most, by_source[source]))
        elif growth.resident.size >= RESIDENT_GROWN and is_steady(growth.resident.sizes):
            alike.setdefault("", []).append((rank, growth, growth.resident, growth.resident.size))
    findings = []
    for source, group in alike.items():
        ranks = [rank for rank, *_ in group]
        _, growth, most, size = max(group, key=lambda entry: entry[3])
        sure = bool(source) and all(line.count >= MANY for _, _, line, _ in group)
        text = _growth_text(names(ranks), len(ranks) == 1, growth, most, size)
        findings.append(Finding("memory", mesh, tuple(ranks), text, source, sure))
    return by_certainty(findings)


def is_steady(sizes: Sequence[int]) -> bool:
    """Returns whether memory grows throughout, also in the first and in the last part of the time, rather than once."""
    first, half, late, last = sizes[0], sizes[len(sizes) // 2], sizes[-2], sizes[-1]
    total = last - first
    return total > 0 and half - first >= 0.15 * total and last - half >= 0.25 * total and last - late >= 0.1 * total


def _growth_text(ranks: str, is_one: bool, growth: "MemoryGrowth", most: "Growth", size: int) -> str:
    by = f"by {size_text(size)}{'' if is_one else ' and less'} in {growth.seconds:.0f} s"
    grows = f"{ranks} {'grows' if is_one else 'grow'} {by}"
    if most is growth.resident:
        return f"{grows}, in memory that neither objects of Python nor tensors of PyTorch explain"
    is_tensor = most.what != "Python objects"
    example = f"{counted(most.count, 'tensor')} {most.what}" if is_tensor else f"{most.count} {most.what}"
    device = "" if most.device == "cpu" else f" on {most.device}"
    line = f"at {line_name(most.source)}" if most.source else "in code of installed packages"
    text = f"{grows} {line}: what is allocated there stays, such as {example}{device}"
    if growth.containers:
        name, more = growth.containers[0]
        text += f"; {name} has {more} more entries than before"
    return text
