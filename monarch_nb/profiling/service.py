"""The profiler in each process: takes the samples that others request, and stores those that others send."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from monarch_nb.mesh.requests import request
from monarch_nb.profiling import verbs
from monarch_nb.profiling.groups import ProfileSamples
from monarch_nb.profiling.recording import ProcessRecording
from monarch_nb.profiling.sampler import Sampler, Stack, Stacks
from monarch_nb.profiling.verbs import (
    Began,
    Begin,
    BeginRecording,
    Recorded,
    Samples,
    SamplesReply,
    StopRecording,
    StopSampling,
)
from monarch_nb.runtime import Feature, Future, Runtime
from monarch_nb.wire import Asker, Verb

M = TypeVar("M", bound=msgspec.Struct)
PATIENCE_S = 30.0  # for the requester to take samples
Key = tuple[str, int, str, int]  # requester, its number of the profile, sampled mesh and rank


class ProfilingService:
    """The profiler of a process that profiles, or is profiled."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._samplers: dict[Key, Sampler] = {}
        self._profiles: dict[int, ProfileSamples] = {}
        self._count = 0
        self._lock = threading.Lock()
        runtime.verbs.handle(verbs.BEGIN, self._begin)
        runtime.verbs.handle(verbs.END, self._end)
        runtime.verbs.handle(verbs.SAMPLES, self._samples)
        self._recording = ProcessRecording(runtime)
        self._timelines: dict[int, Callable[[Recorded], bool]] = {}
        runtime.verbs.handle(verbs.RECORD, self._record)
        runtime.verbs.handle(verbs.END_RECORD, self._end_record)
        runtime.verbs.handle(verbs.RECORDED, self._recorded)

    def close(self) -> None:
        """Stops all samplers."""
        for sampler in tuple(self._samplers.values()):
            sampler.stop()
        self._recording.close()

    # -- sampling for others -------------------------------------------------------------------------------------------

    def _begin(self, body: Begin, asker: Asker[Began]) -> Began:
        """Starts a sampler. An actor that does not exist yet is sampled from its start."""
        key = (asker.src, body.number, body.mesh, body.rank)
        if key not in self._samplers:
            stacks = Stacks()
            sampler = Sampler(
                lambda: self._stacks(stacks, body.mesh, body.rank),
                stacks.frame,
                number=body.number,
                rank=body.rank,
                hz=body.hz,
                named=not body.mesh,
                send=_Sender(self._runtime, asker.src, verbs.SAMPLES, lambda: self._samplers.pop(key, None)),
            )
            self._samplers[key] = sampler
            sampler.start()
        return Began(time.time())

    def _stacks(self, stacks: Stacks, mesh: str, rank: int) -> Iterable[tuple[str, int, Stack]]:
        cells = self._runtime.cells
        if not mesh:
            return stacks.samples(tuple(cells.values()), threads=True)
        cell = cells.get((mesh, rank))
        return () if cell is None else stacks.samples((cell,), threads=False)

    def _end(self, body: StopSampling, asker: Asker[Samples]) -> Samples | None:
        sampler = self._samplers.pop((asker.src, body.number, body.mesh, body.rank), None)
        if sampler is None:
            asker.refuse("it is not sampled")
            return None
        samples = sampler.stop()
        if not samples.seconds and body.mesh and (body.mesh, body.rank) not in self._runtime.cells:
            asker.refuse("there is no such actor here")
            return None
        return samples

    def _record(self, body: BeginRecording, asker: Asker[Began]) -> Began:
        key = (asker.src, body.number, body.mesh, body.rank)
        send = _Sender(self._runtime, asker.src, verbs.RECORDED, lambda: self._recording.forget(key))
        self._recording.begin(key, send, body.pace)
        return Began(time.time())

    def _end_record(self, body: StopRecording, asker: Asker[Recorded]) -> Recorded | None:
        rest = self._recording.end((asker.src, body.number, body.mesh, body.rank))
        if rest is None:
            asker.refuse("it is not recorded")
        return rest

    # -- profiles of this process --------------------------------------------------------------------------------------

    def expect(self) -> tuple[int, ProfileSamples]:
        """Starts a profile; returns its number, and the object that collects its samples."""
        with self._lock:
            self._count += 1
            expected = self._profiles[self._count] = ProfileSamples()
            return self._count, expected

    def forget(self, number: int) -> None:
        """Takes no more samples for a profile; samplers that still send some then end."""
        self._profiles.pop(number, None)

    def _samples(self, samples: Samples, asker: Asker[SamplesReply]) -> SamplesReply:
        profile = self._profiles.get(samples.number)
        if profile is None:
            return SamplesReply(False)
        profile.add(samples)
        return SamplesReply(True)

    # -- timelines of this process -------------------------------------------------------------------------------------

    def expect_timeline(self, add: Callable[[Recorded], bool]) -> int:
        """Starts a timeline, with the calls of this process too; returns its number. `add` returns whether to go on."""
        with self._lock:
            self._count += 1
            self._timelines[self._count] = add
        self._recording.begin(("", self._count, "", -1), add)
        return self._count

    def refresh_timeline(self, number: int) -> None:
        """Adds the records of this process until now."""
        self._recording.send_now(("", number, "", -1))

    def end_timeline(self, number: int) -> None:
        """Adds the remaining records of this process to a timeline, which takes no more."""
        rest = self._recording.end(("", number, "", -1))
        add = self._timelines.pop(number, None)
        if rest is not None and add is not None:
            add(rest)

    def _recorded(self, recorded: Recorded, asker: Asker[SamplesReply]) -> SamplesReply:
        add = self._timelines.get(recorded.number)
        return SamplesReply(add is not None and add(recorded))


class _Sender(Generic[M]):
    """Sends messages to the requester; stops when it no longer takes them, so that nothing runs without a reader."""

    def __init__(self, runtime: Runtime, home: str, verb: Verb[M, SamplesReply], forget: Callable[[], object]) -> None:
        self._runtime, self._home, self._verb = runtime, home, verb
        self._forget = forget
        self._reply: Future[SamplesReply] | None = None
        self._since = 0.0

    def __call__(self, message: M) -> bool:
        goes_on = self._is_wanted()
        if goes_on:
            reply = request(self._runtime, self._home, self._verb, message)
            if self._reply is None:
                self._reply, self._since = reply, time.monotonic()
        else:
            self._forget()
        return goes_on

    def _is_wanted(self) -> bool:
        if self._runtime.closed:
            return False
        if self._reply is None:
            return True
        if not self._reply.done():
            return time.monotonic() - self._since < PATIENCE_S
        if self._reply.exception(0) is not None or not self._reply.get(0).more:
            return False
        self._reply = None
        return True


PROFILING: Feature[ProfilingService] = Feature("profiling")


def attach(runtime: Runtime) -> ProfilingService:
    """Registers the handlers of the profiler's verbs."""
    return ProfilingService(runtime)
