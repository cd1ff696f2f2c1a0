"""`stragglers(mesh)`: which ranks are slow, in which phase, and how long the others wait for them."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median, median_low, stdev
from typing import Any, NamedTuple

from monarch_nb.code.modules import line_name
from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.collector import answers_of, merged, meshes_of
from monarch_nb.diagnosis.findings import UNRECORDED, Diagnosis, Finding, by_certainty, names_of
from monarch_nb.diagnosis.slow_rank import COLLECTIVE, MOST_SECONDS, WAITING
from monarch_nb.diagnosis.verbs import BEGIN_TIMES, END_TIMES, BeginTimes, BegunTimes, EndTimes, RankTimes, TimeSpent
from monarch_nb.mesh import ActorMesh, ProcMesh
from monarch_nb.runtime import ProcState, Runtime, current_runtime
from monarch_nb.shape import MeshTrait
from monarch_nb.wire import counted, host_of

DEFAULT_SECONDS = 3.0
ANSWER_S = 5.0  # for a rank to send its samples

NOTABLE = 0.02  # of the time that others wait for a rank
ERRORS = 1.5  # standard errors that a sampled share may have
CONFIRMED = 0.25  # of its lateness by which a rank also waits less than the others
MANY = 10  # collectives or calls before a finding is sure
SOME = 3
LONG_S = 1.0  # of lateness before a finding is sure: the system may have lent the processor to others for less
SURE, LIKELY = 5.0, 3.0  # standard errors by which a rank is later than the others
LATE_S = 0.00005  # by which a rank is later in the mean: less may be noise of clocks and threads
OFTEN = 0.2  # of the collectives in which a rank is clearly later, if the finding is sure: one of each step
PARTS = 4  # of the time, in each of which a slow rank is later
CLEAR = 2.5  # standard errors by which a reported sampled share is larger
UNCLEAR = "more seconds of samples would show what takes longer"
CROWDED = 0.1  # of the time in which ranks wait for a processor, if the machine has too few
MOSTLY = 0.5  # of the time that a rank takes longer than others


@dataclass(frozen=True)
class MeasuredProcs:
    """The samples that the processes of a mesh have taken of themselves, by base rank."""

    name: str
    ranks: Mapping[int, RankTimes]
    clocks: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """The least and the most seconds by which a rank's clock is ahead; ranks of one machine share a clock."""
    where: Callable[[Iterable[int]], str] = field(default=lambda ranks: f"ranks {sorted(ranks)}")


class _Lateness(NamedTuple):
    """A rank's delay behind the others that take part, in collectives or calls in the order of time."""

    title: str  # "collectives", "calls"
    seconds: Sequence[float]  # after the median of the others; less than 0 where it is earlier
    span: float  # seconds between the first and the last

    @property
    def mean(self) -> float:
        return fmean(self.seconds)

    @property
    def share(self) -> float:
        """The mean, as a share of the time between two of them."""
        return self.mean * len(self.seconds) / self.span if self.span else 0.0

    @property
    def errors(self) -> float:
        """The mean in standard errors."""
        error = stdev(self.seconds) / math.sqrt(len(self.seconds)) if len(self.seconds) > 1 else math.inf
        return self.mean / error if error else math.copysign(math.inf, self.mean)

    @property
    def is_likely(self) -> bool:
        return len(self.seconds) >= SOME and self.mean >= LATE_S and self.errors >= LIKELY

    @property
    def is_sure(self) -> bool:
        count, half = len(self.seconds), self.mean / 2
        if count < MANY or self.span < LONG_S or sum(seconds >= half for seconds in self.seconds) < OFTEN * count:
            return False
        parts = [self.seconds[part * count // PARTS : (part + 1) * count // PARTS] for part in range(PARTS)]
        return self.errors >= SURE and all(fmean(part) > 0 for part in parts)

    def __str__(self) -> str:
        late, count = f"{1000 * self.mean:.1f} ms", len(self.seconds)
        if self.title == "collectives":
            return f"begins collectives {late} later than the others, in the mean of {count}"
        return f"takes {late} longer for a call, in the mean of {count}"


class _Difference(NamedTuple):
    """The phase in which a slow rank takes longer than others, and the line of the program, if known."""

    phase: str
    source: str
    text: str


# In the order of a step; phases in which a rank waits are last.
PHASES = (
    "data iterator", "forward", "backward", "optimizer", "other", "garbage collection", "replies", "collective", "idle",
)  # fmt: skip
_PHASE_TEXTS = {
    "": "",
    "replies": "waiting for replies of other actors",
    "garbage collection": "garbage collection",
    "data iterator": "in the data iterator",
    "optimizer": "in the optimizer",
    "backward": "in the backward pass",
    "forward": "in the forward pass",
}


def judge_times(procs: MeasuredProcs) -> tuple[Finding, ...]:
    """Returns findings about ranks that hold others up by being slow, the certain ones first. Pure.

    A slow rank waits less than the others: the difference is its cost. It is named only if it also begins collectives,
    or ends calls, later than the others; the finding is sure only if it does so often, throughout the time.
    """
    ranks = {rank: times for rank, times in procs.ranks.items() if times.samples and times.seconds}
    if len(ranks) < 2:  # also if a cell has ended before a sample was taken
        return ()
    lateness = _lateness(procs, ranks)
    own = {rank: 1.0 - _share(times, WAITING) for rank, times in ranks.items()}
    typical = median_low(own.values())
    slow = []
    for rank, late in lateness.items():
        # Samples have an error; the times at which collectives begin are exact.
        error = ERRORS * _error(own[rank], typical, ranks[rank].samples)
        is_certain = late.is_sure and late.share >= NOTABLE
        least = late.share * CONFIRMED - error if is_certain else NOTABLE + error
        if late.is_likely and own[rank] - typical >= least:
            slow.append(rank)
    peers = [rank for rank in ranks if rank not in slow]
    most = max((own[rank] for rank in slow), default=0.0) - typical
    longer = {rank: _longer(ranks, rank, peers) for rank in slow if own[rank] - typical >= most * MOSTLY}
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for rank, difference in longer.items():
        sure = lateness[rank].is_sure and not _is_short_of_processors(ranks, rank, peers, own[rank] - typical)
        groups.setdefault((difference.phase, difference.source, sure), []).append(rank)
    findings = []
    for (_, source, sure), group in groups.items():
        latest = max((lateness[rank] for rank in group), key=lambda late: late.mean)
        text = f"{procs.where(group)} {_text(ranks, own, latest, group, peers, longer[group[0]])}"
        findings.append(Finding("slow", procs.name, tuple(group), text, source, sure))
    return by_certainty(findings)


def _is_short_of_processors(ranks: Mapping[int, RankTimes], rank: int, peers: Sequence[int], more: float) -> bool:
    """Returns whether all ranks wait for processors, and `rank` merely for longer, by the scheduler's choice."""
    if not peers:
        return False
    mine, theirs = _queued(ranks[rank]), median(_queued(ranks[peer]) for peer in peers)
    return theirs >= CROWDED and mine - theirs >= MOSTLY * more


def _text(
    ranks: Mapping[int, RankTimes],
    own: Mapping[int, float],
    lateness: _Lateness,
    group: Sequence[int],
    peers: Sequence[int],
    longer: _Difference,
) -> str:
    share, rest = median(own[rank] for rank in group), median(own[rank] for rank in peers)
    holds, subject, its = ("holds", "it", "its") if len(group) == 1 else ("hold", "the slowest", "their")
    cost = _percent(max(0.01, share - rest))
    texts = [
        f"{holds} the others up for {cost} of the time: {subject} {lateness}; work of {its} own takes "
        f"{_percent(share)} of the time, that of the others {_percent(rest)}",
        longer.text,
    ]
    gpus = {gpu for rank in group if (gpu := ranks[rank].gpu)} - {ranks[rank].gpu for rank in peers}
    whose = "its GPU" if len(group) == 1 else "the GPU of one of them"
    texts += [f"{whose} runs slower than it could: {gpu}" for gpu in sorted(gpus)[:1]]
    texts += _gpu_text(ranks, group, peers)
    for reason, measure in _REASONS:
        mine, theirs = median(measure(ranks[rank]) for rank in group), median(measure(ranks[rank]) for rank in peers)
        if mine - theirs >= max(NOTABLE, MOSTLY * (share - rest)):
            texts.append(f"{reason} {_percent(mine)} of the time, elsewhere {_percent(theirs)}")
            break
    return "; ".join(texts)


def _gpu_text(ranks: Mapping[int, RankTimes], group: Sequence[int], peers: Sequence[int]) -> list[str]:
    """Says how busy the GPUs of these ranks and of the others are; empty unless known for all."""
    mine, theirs = [ranks[rank].gpu_share for rank in group], [ranks[rank].gpu_share for rank in peers]
    if not theirs or min(*mine, *theirs) < 0:
        return []
    subject = "its GPU is" if len(group) == 1 else "their GPUs are"
    return [
        f"{subject} busy for {_percent(median(mine))} of the time, those of the others for {_percent(median(theirs))}"
    ]


def _queued(times: RankTimes) -> float:
    return times.queued / times.seconds


# Reasons outside the program, and the share of the time that they take.
_REASONS: tuple[tuple[str, Callable[[RankTimes], float]], ...] = (
    ("the limit of its container takes", lambda times: times.throttled / times.seconds),
    ("waiting for a free processor takes", _queued),
)


def _longer(ranks: Mapping[int, RankTimes], rank: int, peers: Sequence[int]) -> _Difference:
    """Returns the line or phase in which a rank takes longer than the median of the others."""
    lines = _compared(ranks, rank, peers, lambda spent: (spent.phase, spent.source))
    phases = _compared(ranks, rank, peers, lambda spent: (spent.phase, ""))
    total = sum(mine - theirs for mine, theirs in lines.values())
    samples = ranks[rank].samples
    phase, source = max(lines, key=lambda key: lines[key][0] - lines[key][1], default=("", ""))
    if source and _is_most(*lines[phase, source], total, samples):
        location = ", ".join(part for part in (_PHASE_TEXTS[phase], _source_text(source)) if part)
        return _Difference(phase, source, _most_text(location, *lines[phase, source]))
    phase, _ = max(phases, key=lambda key: phases[key][0] - phases[key][1], default=("", ""))
    if phase and _is_most(*phases[phase, ""], total, samples):
        of_phase = {key: mine - theirs for key, (mine, theirs) in lines.items() if key[0] == phase}
        source = max(of_phase, key=of_phase.__getitem__)[1]
        return _Difference(phase, source, _most_text(_PHASE_TEXTS[phase], *phases[phase, ""]))
    mine, theirs = (sum(pair[side] for pair in phases.values()) for side in (0, 1))
    return _Difference("", "", "all that it does takes longer" if _is_most(mine, theirs, total, samples) else UNCLEAR)


def _source_text(source: str) -> str:
    """Describes a line, or an operation on sharded tensors."""
    return f"at {line_name(source)}" if ":" in source else f"in {source}"


def _most_text(location: str, mine: float, theirs: float) -> str:
    return f"most of the difference is {location} ({_percent(mine)} of the time, elsewhere {_percent(theirs)})"


def _is_most(mine: float, theirs: float, total: float, samples: int) -> bool:
    """Returns whether a difference is most of `total`, and significant for so many samples."""
    return mine - theirs >= max(MOSTLY * total, CLEAR * _error(mine, theirs, samples))


def _compared(
    ranks: Mapping[int, RankTimes], rank: int, peers: Sequence[int], key_of: Callable[[TimeSpent], tuple[str, str]]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns a rank's share of the time and the others' median, by key, where the rank's is larger."""
    shares = {member: dict[tuple[str, str], float]() for member in (rank, *peers)}
    for member, by_key in shares.items():
        for spent in ranks[member].spent:
            if spent.phase not in WAITING:
                by_key[key_of(spent)] = by_key.get(key_of(spent), 0.0) + spent.seconds / ranks[member].seconds
    pairs = {key: (mine, median(shares[peer].get(key, 0.0) for peer in peers)) for key, mine in shares[rank].items()}
    return {key: (mine, theirs) for key, (mine, theirs) in pairs.items() if mine > theirs}


def _share(times: RankTimes, phases: Iterable[str]) -> float:
    return sum(spent.seconds for spent in times.spent if spent.phase in phases) / times.seconds


def _error(mine: float, theirs: float, samples: int) -> float:
    """Returns the standard error of the difference of two sampled shares."""
    return math.sqrt((mine * (1 - mine) + theirs * (1 - theirs)) / samples)


def phase_shares(procs: MeasuredProcs) -> dict[int, dict[str, float]]:
    """Returns the share of the time that each rank has spent in each phase; "other" outside all phases."""
    shares: dict[int, dict[str, float]] = {}
    for rank, times in procs.ranks.items():
        if times.seconds:
            shares[rank] = dict.fromkeys(PHASES, 0.0)
            for spent in times.spent:
                shares[rank][spent.phase or "other"] += spent.seconds / times.seconds
    return shares


# -- lateness ----------------------------------------------------------------------------------------------------------


def _lateness(procs: MeasuredProcs, ranks: Mapping[int, RankTimes]) -> dict[int, _Lateness]:
    """Returns the lateness of each rank in collectives, or in calls if there are too few collectives."""
    events = sorted(_collectives(procs, ranks), key=lambda event: max(event.values()))
    collectives = _late_of("collectives", events, max(events[-1].values()) - max(events[0].values()) if events else 0.0)
    calls = _late_of("calls", list(_calls(ranks)), max(times.seconds for times in ranks.values()))
    enough = {rank: late for rank, late in collectives.items() if len(late.seconds) >= MANY}
    return {**collectives, **calls, **enough}


def _late_of(title: str, events: Sequence[Mapping[int, float]], span: float) -> dict[int, _Lateness]:
    """Returns the lateness of each rank; `events` has its beginnings or durations in seconds, in the order of time.

    An event that took very long counts no more than others that took long, so that it does not decide alone.
    """
    late: dict[int, list[float]] = {}
    for times in events:
        for rank, own in times.items():
            late.setdefault(rank, []).append(own - median(value for peer, value in times.items() if peer != rank))
    limits = {rank: sorted(map(abs, delays))[int(0.9 * (len(delays) - 1))] for rank, delays in late.items()}
    return {
        rank: _Lateness(title, [min(limits[rank], max(-limits[rank], seconds)) for seconds in delays], span)
        for rank, delays in late.items()
    }


def _collectives(procs: MeasuredProcs, ranks: Mapping[int, RankTimes]) -> Iterator[dict[int, float]]:
    """Yields the times at which ranks began each collective that all answering members of its group have begun."""
    groups: dict[GroupKey, dict[int, dict[int, int]]] = {}
    for base, times in ranks.items():
        for begun in times.collectives:
            groups.setdefault(begun.group, {})[base] = dict(zip(begun.numbers, begun.times, strict=True))
    for members in groups.values():
        if len(members) < 2:
            continue
        for number in sorted(set.intersection(*(set(numbers) for numbers in members.values()))):
            event = {base: numbers[number] / 1e9 - _ahead(procs, base) for base, numbers in members.items()}
            unknown = max(_unknown(procs, base) for base in members)
            if not unknown or max(event.values()) - min(event.values()) > unknown:
                yield event


def _ahead(procs: MeasuredProcs, rank: int) -> float:
    least, most = procs.clocks.get(rank, (0.0, 0.0))
    return (least + most) / 2


def _unknown(procs: MeasuredProcs, rank: int) -> float:
    least, most = procs.clocks.get(rank, (0.0, 0.0))
    return most - least


def _calls(ranks: Mapping[int, RankTimes]) -> Iterator[dict[int, float]]:
    """Yields the durations by rank of each call that ran on several ranks and has ended."""
    calls: dict[str, dict[int, float]] = {}
    for base, times in ranks.items():
        for call in times.calls[1:-1]:  # the first had begun before, and the last may not have ended
            calls.setdefault(call.call, {})[base] = call.seconds
    yield from (by_rank for by_rank in calls.values() if len(by_rank) > 1)


# -- texts -------------------------------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- of real processes -------------------------------------------------------------------------------------------------


class StragglerWatch:
    """Compares the ranks of a mesh while it is entered: which are slow, in which phase of their steps, at which line.

    On exit, `diagnosis` has the findings, and `measured` the time of each rank by phase and line.
    """

    def __init__(self, mesh: "ActorMesh[Any] | ProcMesh | MeshTrait | None" = None) -> None:
        self._runtime = current_runtime()
        self._number = time.time_ns()
        self._meshes = meshes_of(self._runtime, mesh)
        self._clocks: dict[str, dict[int, tuple[float, float]]] = {}
        self._began = 0.0
        self.diagnosis = Diagnosis((), "nothing yet")
        self.measured: tuple[MeasuredProcs, ...] = ()

    def __enter__(self) -> "StragglerWatch":
        """Begins on all ranks. Blocks until then; ranks that do not answer in time are not compared."""
        sent_ns = time.time_ns()
        begun = answers_of(self._runtime, self._meshes, BEGIN_TIMES, BeginTimes(self._number), ANSWER_S)
        answered_ns = time.time_ns()
        for procs, ranks in begun:
            self._clocks[procs.uid] = _clocks(self._runtime, procs, ranks, sent_ns, answered_ns)
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends on all ranks, and compares them."""
        seconds = time.monotonic() - self._began
        diagnoses, end, all_measured = [], EndTimes(self._number), []
        for procs, ranks in answers_of(self._runtime, self._meshes, END_TIMES, end, ANSWER_S):
            clocks = self._clocks.get(procs.uid, {})
            measured = MeasuredProcs(procs.name, ranks, clocks, partial(names_of, procs.region))
            all_measured.append(measured)
            diagnoses.append(Diagnosis(judge_times(measured), _inspected(procs, measured, seconds)))
        self.diagnosis, self.measured = merged(diagnoses), tuple(all_measured)

    def __str__(self) -> str:
        return str(self.diagnosis)

    __repr__ = __str__


def stragglers(
    mesh: "ActorMesh[Any] | ProcMesh | MeshTrait | None" = None, seconds: float = DEFAULT_SECONDS
) -> Diagnosis:
    """Finds out which ranks are slow, in which phase of their steps and at which line.

    Every process of a mesh, or without one of all meshes with calls under way, samples itself for so many seconds: how
    long it waits for messages or in collectives of torch.distributed, and what it does otherwise. PyTorch's flight
    recorder knows the last rank to begin each collective, also earlier in the same call, for up to a minute. Ranks
    without collectives are compared by the calls that they run. Interrupts nothing; sampling takes up to 3 % of the
    time. Blocks for `seconds`, and some more where ranks do not answer. The work of a GPU is not sampled, only its
    process.

    Raises TypeError for a value that is not a mesh, ValueError for `seconds` out of range.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"seconds={seconds} is not between 0 and {MOST_SECONDS:g}")
    with StragglerWatch(mesh) as watch:
        time.sleep(seconds)
    return watch.diagnosis


def _clocks(
    runtime: Runtime, procs: ProcState, replies: Mapping[int, BegunTimes], begin: int, end: int
) -> dict[int, tuple[float, float]]:
    """Returns the least and the most seconds by which the clock of each rank's machine is ahead of this one's."""
    hosts = {rank: host_of(procs.address(rank)) for rank in replies}
    if len(set(hosts.values())) < 2:
        return {}
    bounds: dict[str, tuple[float, float]] = {}
    for rank, begun in replies.items():
        if hosts[rank] not in runtime.local_hosts:
            least, most = bounds.get(hosts[rank], (-math.inf, math.inf))
            bounds[hosts[rank]] = max(least, (begun.clock - end) / 1e9), min(most, (begun.clock - begin) / 1e9)
    return {rank: bounds.get(host, (0.0, 0.0)) for rank, host in hosts.items()}


def _inspected(procs: ProcState, measured: MeasuredProcs, seconds: float) -> str:
    ranks = measured.ranks
    text = f"{counted(len(ranks), 'process')} of {procs.name} for {seconds:.0f} s"
    shares = [1.0 - _share(times, WAITING) for times in ranks.values() if times.seconds]
    if shares:
        least, most = _percent(min(shares)), _percent(max(shares))
        text += f", in work of their own for {least if least == most else f'{least[:-2]} to {most}'} of the time"
    silent = [rank for rank in procs.region.ndslice if rank not in ranks]
    if silent:
        text += f"; {measured.where(silent)} did not answer"
    in_collectives = any(spent.phase == COLLECTIVE for times in ranks.values() for spent in times.spent)
    if in_collectives and not any(times.collectives for times in ranks.values()):
        text += f"; who begins collectives late cannot be seen: {UNRECORDED}"
    return text
