"""`profile(mesh)`: samples every rank of a mesh while a block runs."""

import contextlib
import gzip
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, ValueMesh, region_of, run_on_each, state_of, values_or_errors
from monarch_nb.mesh.requests import request
from monarch_nb.profiling import verbs
from monarch_nb.profiling.result import Profile
from monarch_nb.profiling.service import PROFILING
from monarch_nb.profiling.verbs import Began, Begin, StopSampling
from monarch_nb.runtime import Future, MeshState, Runtime, current_runtime, when_done
from monarch_nb.shape import MeshTrait
from monarch_nb.wire import first_line, kind_of, text_of

END_S = 60.0  # for the ranks to write their traces and send them
_CALL = "__import__('monarch_nb.profiling.sampler', fromlist=['begin_trace']).{call}"
NUMBERS_PER_RANK = 1000  # numbers of processes for each rank
_FLOWS = frozenset({"s", "t", "f", "b", "n", "e"})  # phases of events that share an id


Trace: TypeAlias = dict[str, Any]  # JSON that PyTorch writes


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank in PyTorch's form. `ahead` is the seconds by which its host's clock is ahead of ours."""

    rank: int
    label: str
    document: Trace
    ahead: float = 0.0


def merged_trace(traces: Iterable[RankTrace]) -> Trace:
    """Merges traces into one document: each rank's processes under its label, in rank order, with one zero of time.

    PyTorch writes microseconds since `baseTimeNanoseconds` of the host's clock.
    """
    ordered = sorted(traces, key=lambda trace: trace.rank)
    bases = [_base(trace.document) - 1e6 * trace.ahead for trace in ordered]
    zero = min(bases, default=0.0)
    events: list[Trace] = []
    for trace, base in zip(ordered, bases, strict=True):
        events += _moved(trace, base - zero)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(1000 * zero), "traceEvents": events}


def _base(document: Trace) -> float:
    """Returns the zero of a trace's times, in microseconds since the epoch."""
    return float(document.get("baseTimeNanoseconds", 0)) / 1000


def _moved(trace: RankTrace, shift: float) -> list[Trace]:
    processes: dict[object, int] = {}
    moved = []
    for event in trace.document.get("traceEvents", ()):
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue  # replaced by our names
        changed = dict(event)
        if "pid" in event:
            changed["pid"] = processes.setdefault(event["pid"], NUMBERS_PER_RANK * (trace.rank + 1) + len(processes))
        if "ts" in event:
            changed["ts"] = event["ts"] + shift
        if "id" in event and event.get("ph") in _FLOWS:
            changed["id"] = f"{trace.rank}.{event['id']}"
        moved.append(changed)
    return [*_names(trace, processes), *moved]


def _names(trace: RankTrace, processes: Mapping[object, int]) -> list[Trace]:
    names: dict[object, str] = {
        event["pid"]: str(event.get("args", {}).get("labels", ""))
        for event in trace.document.get("traceEvents", ())
        if event.get("ph") == "M" and event.get("name") == "process_labels"
    }
    events = []
    for number, (pid, ours) in enumerate(processes.items()):
        suffix = names.get(pid, "") or ("" if isinstance(pid, int) else str(pid))
        name = f"{trace.label} {suffix}".rstrip()
        events.append({"ph": "M", "name": "process_name", "pid": ours, "args": {"name": name}})
        order = {"sort_index": NUMBERS_PER_RANK * trace.rank + number}
        events.append({"ph": "M", "name": "process_sort_index", "pid": ours, "args": order})
    return events


class Traces:
    """The traces of one profile."""

    def __init__(self, mesh: AnyMesh, profile: Profile) -> None:
        self._mesh, self._profile = mesh, profile
        self._number = time.time_ns()

    def begin(self) -> None:
        """Starts PyTorch's profiler on all ranks. Blocks until the ranks have ended their present work.

        Raises RuntimeError where PyTorch is not installed, or its profiler runs there already.
        """
        all_threads = not isinstance(self._mesh, ActorMesh)
        begun = self._run(f"begin_trace({self._number}, every_thread={all_threads})")
        failures = {rank: reason for rank, (_, reason) in _results(begun, None).items() if reason}
        if failures:
            rank, reason = next(iter(failures.items()))
            self._run(f"end_trace({self._number})")
            raise RuntimeError(f"PyTorch's profiler did not begin on {self._named([rank])}: {reason}")

    def end(self, folder: str, ahead: Mapping[int, float]) -> None:
        """Writes the traces of all ranks that answer to one file, and notes on missing ones to the profile. `ahead` is
        the seconds by which the clocks of ranks are ahead of this one.
        """
        results = _results(self._run(f"end_trace({self._number})"), END_S)
        traces = []
        for rank, (packed, reason) in results.items():
            if reason:
                self._profile.notes.append(f"{self._named([rank])} gave no trace: {reason}")
            else:
                document = json.loads(gzip.decompress(packed))
                traces.append(RankTrace(rank, self._named([rank]), document, ahead.get(rank, 0.0)))
        if traces:
            self._profile.trace = _written(Path(folder), self._profile.name, merged_trace(traces))

    def _run(self, call: str) -> "dict[int, Future[ValueMesh[bytes]]]":
        return run_on_each(self._mesh, _CALL.format(call=call), filename="<torch.profiler>")

    def _named(self, ranks: Sequence[int]) -> str:
        return f"{state_of(self._mesh).name} {self._profile.where(ranks)}"


def _results(futures: "dict[int, Future[ValueMesh[bytes]]]", seconds: float | None) -> dict[int, tuple[bytes, str]]:
    """Returns the result of each rank, or the reason why there is none."""
    results: dict[int, tuple[bytes, str]] = {}
    for rank, value in values_or_errors(futures, seconds).items():
        if isinstance(value, TimeoutError):
            results[rank] = b"", f"it was still busy after {seconds:g} s"
        elif isinstance(value, Exception):
            results[rank] = b"", first_line(text_of(value))
        else:
            results[rank] = value, ""
    return results


def _written(folder: Path, name: str, document: Trace) -> Path:
    """Writes the file, under another name first so that no partial file is left; returns its path."""
    plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
    target = folder / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
    partial = target.with_name(f".{target.name}.part")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(document, file, separators=(",", ":"))
    partial.replace(target)
    return target


T = TypeVar("T")

ANSWER_S = 3.0  # for the processes to begin, and to send the rest
CLOCKS_S = 0.1  # smaller differences of clocks may be the latency of a message
HZ = 100.0
MOST_HZ = 1000.0


@contextlib.contextmanager
def profile(mesh: AnyMesh | MeshTrait, *, hz: float = HZ, torch: bool = False, folder: str = ".") -> Iterator[Profile]:
    """Samples the stacks of every rank of a mesh, or slice, while the `with` block runs; `as` gives the Profile.

    For a mesh of actors their own threads are sampled, for a mesh of processes (or of tensors) all their threads. No
    code changes, and nothing has to be installed: each process samples itself `hz` times a second, less often where
    that would take more than 3 % of its time. With `torch`, PyTorch's own profiler runs on each rank as well, between
    two messages of the rank, and all traces are written to one file in `folder`, which Perfetto opens.

    Blocks a moment at both ends. `notes` names ranks that die or do not answer; samples taken before are kept. Raises
    RuntimeError for a stopped mesh, TypeError for a value that is not a mesh, ValueError for `hz` out of range.
    """
    part = part_of_mesh(mesh, "profiled")
    if not 0 < hz <= MOST_HZ:
        raise ValueError(f"hz={hz} is not between 0 and {MOST_HZ:g} looks a second")
    state = state_of(part)
    if state.stopped is not None:
        raise RuntimeError(f"{state.name} was stopped ({state.stopped}): there is nothing to profile; spawn it again")
    sampling = _Sampling(current_runtime(), part, hz)
    traces = Traces(part, sampling.profile) if torch else None
    if traces is not None:
        traces.begin()  # this start is not sampled
    try:
        sampling.begin()
        try:
            yield sampling.profile
        finally:
            sampling.end()
    finally:
        if traces is not None:
            traces.end(folder, sampling.ahead)


def part_of_mesh(mesh: object, verb: str) -> AnyMesh:
    """Returns the actors or processes of a mesh. Raises TypeError for a value that cannot be `verb`."""
    if isinstance(mesh, (ActorMesh, ProcMesh)):
        return mesh
    procs = getattr(mesh, "procs", None) if isinstance(mesh, MeshTrait) else None
    if isinstance(procs, ProcMesh):
        return procs
    raise TypeError(f"a mesh of actors, processes or tensors can be {verb}, not {kind_of(mesh)}")


class _Sampling:
    """The samplers of one profile, one on each rank."""

    def __init__(self, runtime: Runtime, mesh: AnyMesh, hz: float) -> None:
        state: MeshState = state_of(mesh)
        procs = state_of(mesh) if isinstance(mesh, ProcMesh) else state_of(mesh).procs
        self._runtime = runtime
        self._service = runtime.feature(PROFILING)
        self._uid = state.uid if isinstance(mesh, ActorMesh) else ""
        self._addresses = {rank: procs.address(rank) for rank in region_of(mesh).ranks()}
        self._number, samples = self._service.expect()
        self.profile = Profile(state.name, state.region, hz, samples)
        self._begun = time.monotonic()
        self.ahead: dict[int, float] = {}  # seconds by which the clocks of other hosts are ahead of this one

    def begin(self) -> None:
        """Asks all ranks to sample; ranks that do not answer in time begin later."""
        hz = self.profile.hz
        requests = {
            rank: request(self._runtime, address, verbs.BEGIN, Begin(self._number, self._uid, rank, hz))
            for rank, address in self._addresses.items()
        }
        for rank, future in requests.items():
            when_done(future, self._compare(rank, time.time()))
        try:
            sort_answers(requests)
        except BaseException:
            self.end()
            raise
        self._begun = time.monotonic()

    def _compare(self, rank: int, sent_at: float) -> "Callable[[Future[Began]], None]":
        def compare(answered: "Future[Began]") -> None:
            middle = (sent_at + time.time()) / 2
            if answered.exception(0) is None and abs(ahead := answered.get(0).at - middle) > CLOCKS_S:
                self.ahead[rank] = ahead

        return compare

    def end(self) -> None:
        """Stops sampling, and adds notes about ranks to the profile."""
        self.profile.seconds = time.monotonic() - self._begun
        requests = {
            rank: request(self._runtime, address, verbs.END, StopSampling(self._number, self._uid, rank))
            for rank, address in self._addresses.items()
        }
        try:
            answers, silent = sort_answers(requests)
            for samples in answers.values():
                self.profile.add(samples)
            self.profile.notes += self._notes(silent)
        finally:
            self._service.forget(self._number)

    def _notes(self, silent: dict[int, str]) -> list[str]:
        """Returns a note for each reason why ranks did not answer."""
        profiles = self.profile.ranks
        reasons: dict[str, list[int]] = {}
        for rank, reason in silent.items():
            reasons.setdefault(reason, []).append(rank)
        notes = []
        for reason, ranks in reasons.items():
            seconds = max((profiles[rank].seconds for rank in ranks if rank in profiles), default=0.0)
            remark = f"what was seen of it in {seconds:.1f} s is here" if seconds else "nothing was seen of it"
            notes.append(f"{self.profile.name} {self.profile.where(ranks)}: {reason}; {remark}")
        return notes


def sort_answers(requests: Mapping[int, Future[T]]) -> tuple[dict[int, T], dict[int, str]]:
    """Returns the answers within the common time limit, and the reasons why other ranks did not answer."""
    deadline = time.monotonic() + ANSWER_S
    answers: dict[int, T] = {}
    silent: dict[int, str] = {}
    for rank, future in requests.items():
        try:
            answers[rank] = future.get(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            silent[rank] = f"it did not answer within {ANSWER_S:g} s"
        except Exception as error:
            silent[rank] = text_of(error)
    return answers, silent
