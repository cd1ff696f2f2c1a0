"""`profile(mesh)`: samples every rank of a mesh while a block runs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.profiling import verbs
from monarch_nb.profiling.messages import Began, Begin, StopSampling
from monarch_nb.profiling.result import Profile
from monarch_nb.profiling.service import PROFILING
from monarch_nb.profiling.traces import Traces
from monarch_nb.runtime import Future, MeshState, Runtime, current_runtime, when_done
from monarch_nb.shape import MeshTrait
from monarch_nb.wire import kind_of, text_of

T = TypeVar("T")

ANSWER_S = 3.0  # for the processes to begin, and to send the rest
CLOCKS_S = 0.1  # smaller differences of clocks are within the time that a message takes
HZ = 100.0
MOST_HZ = 1000.0


@contextlib.contextmanager
def profile(mesh: AnyMesh | MeshTrait, *, hz: float = HZ, torch: bool = False, folder: str = ".") -> Iterator[Profile]:
    """Samples the stacks of every rank of a mesh, or slice, while the `with` block runs; `as` gives the Profile.

    For a mesh of actors their own threads are sampled, for a mesh of processes (or of tensors) all threads of these. No
    code changes, and nothing has to be installed: each process samples itself `hz` times a second, less often where
    that would take more than 3 % of its time. With `torch`, PyTorch's own profiler runs on each rank as well, and the
    traces of all are one file in `folder`, which Perfetto opens; it begins and ends between the messages of each rank.

    Blocks a moment at both ends. `notes` names ranks that die or do not answer; samples taken before are kept. Raises
    RuntimeError for a stopped mesh, TypeError for a value that is not a mesh, ValueError for `hz` out of range.
    """
    part = _part(mesh)
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


def _part(mesh: object) -> AnyMesh:
    if isinstance(mesh, (ActorMesh, ProcMesh)):
        return mesh
    procs = getattr(mesh, "procs", None) if isinstance(mesh, MeshTrait) else None
    if isinstance(procs, ProcMesh):
        return procs
    raise TypeError(f"a mesh of actors, processes or tensors can be profiled, not {kind_of(mesh)}")


class _Sampling:
    """The samplers of one profile, one on each rank."""

    def __init__(self, runtime: Runtime, mesh: AnyMesh, hz: float) -> None:
        state: MeshState = state_of(mesh)
        procs = state_of(mesh) if isinstance(mesh, ProcMesh) else state_of(mesh).procs
        self._runtime = runtime
        self._service = runtime.feature(PROFILING)
        self._uid = state.uid if isinstance(mesh, ActorMesh) else ""
        self._addresses = {rank: procs.address(rank) for rank in region_of(mesh).ranks()}
        self._number, seen = self._service.expect()
        self.profile = Profile(state.name, state.region, hz, seen)
        self._begun = time.monotonic()
        self.ahead: dict[int, float] = {}  # seconds by which the clocks of other hosts are ahead of this one

    def begin(self) -> None:
        """Asks all ranks to sample; ranks that do not answer in time begin when they can."""
        hz = self.profile.hz
        asked = {
            rank: request(self._runtime, address, verbs.BEGIN, Begin(self._number, self._uid, rank, hz))
            for rank, address in self._addresses.items()
        }
        for rank, future in asked.items():
            when_done(future, self._compare(rank, time.time()))
        try:
            _answers(asked)
        except BaseException:
            self.end()
            raise
        self._begun = time.monotonic()

    def _compare(self, rank: int, sent: float) -> "Callable[[Future[Began]], None]":
        def compare(answered: "Future[Began]") -> None:
            middle = (sent + time.time()) / 2
            if answered.exception(0) is None and abs(ahead := answered.get(0).at - middle) > CLOCKS_S:
                self.ahead[rank] = ahead

        return compare

    def end(self) -> None:
        """Stops sampling, and adds notes about ranks to the profile."""
        self.profile.seconds = time.monotonic() - self._begun
        asked = {
            rank: request(self._runtime, address, verbs.END, StopSampling(self._number, self._uid, rank))
            for rank, address in self._addresses.items()
        }
        try:
            answers, silent = _answers(asked)
            for samples in answers.values():
                self.profile.add(samples)
            self.profile.notes += self._notes(silent)
        finally:
            self._service.forget(self._number)

    def _notes(self, silent: dict[int, str]) -> list[str]:
        """A note for each reason for which ranks did not answer."""
        ranks_seen = self.profile.ranks
        reasons: dict[str, list[int]] = {}
        for rank, why in silent.items():
            reasons.setdefault(why, []).append(rank)
        notes = []
        for why, ranks in reasons.items():
            seconds = max((ranks_seen[rank].seconds for rank in ranks if rank in ranks_seen), default=0.0)
            remark = f"what was seen of it in {seconds:.1f} s is here" if seconds else "nothing was seen of it"
            notes.append(f"{self.profile.name} {self.profile.where(ranks)}: {why}; {remark}")
        return notes


def _answers(asked: Mapping[int, Future[T]]) -> tuple[dict[int, T], dict[int, str]]:
    """The answers within the common time limit, and why other ranks did not answer."""
    until = time.monotonic() + ANSWER_S
    answers: dict[int, T] = {}
    silent: dict[int, str] = {}
    for rank, future in asked.items():
        try:
            answers[rank] = future.get(max(0.0, until - time.monotonic()))
        except TimeoutError:
            silent[rank] = f"it did not answer within {ANSWER_S:g} s"
        except Exception as error:
            silent[rank] = text_of(error)
    return answers, silent
