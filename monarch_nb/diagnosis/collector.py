"""`diagnose(mesh)`: collects evidence from every process of a mesh, twice, and returns the verdict.

Without a request it does so for a call that makes no progress while a thread waits for it.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from monarch_nb.diagnosis.findings import UNRECORDED, CallAbortedError, Diagnosis, Finding, by_certainty
from monarch_nb.diagnosis.judge import LONG_S, STOPPED, Procs, UnansweredCall, is_in_unrecorded, judge
from monarch_nb.diagnosis.verbs import INSPECT, AwaitedCall, Evidence, Inspect
from monarch_nb.host import verbs as host_verbs
from monarch_nb.host.protocol import AskSamples, ProcSample
from monarch_nb.lifecycle.interrupts import interrupted
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh import ActorMesh, ProcMesh, state_of
from monarch_nb.mesh.handle import operations
from monarch_nb.mesh.requests import ask_ranks, request, settle
from monarch_nb.runtime import (
    ActorState,
    EndpointProperty,
    Future,
    MeshState,
    PendingCall,
    ProcState,
    Runtime,
    WaitObserver,
    current_runtime,
    fail_future,
    pending_future,
    proc_state_of,
    resolve_future,
    when_done,
)
from monarch_nb.shape import MeshTrait, places_of
from monarch_nb.store import describe
from monarch_nb.wire import Verb, agent_of, counted, harmless, kind_of

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

SECOND_LOOK_S = 1.5  # for a process that has answered the first look; later it counts as too busy
LOOKS_APART_S = 0.4  # a rank that works has moved by then
DEFAULT_TIMEOUT_S = 5.0
ASLEEP_S = 1.0  # for which an unresponsive process is observed before it is reported as asleep
AWAKE = 0.1  # the least share of the time in which a process that is awake uses a processor
MOST_NOTED = 2  # findings in the error of a call
WITHOUT_PROGRESS_S = 10.0  # until the reason is looked for
AGAIN_S, MOST_AGAIN_S = 5.0, 20.0  # until the next look, at first and finally: a call may rightly take hours


def diagnose(
    mesh: "ActorMesh[Any] | ProcMesh | MeshTrait | None" = None, timeout: float = DEFAULT_TIMEOUT_S
) -> Diagnosis:
    """Finds out which ranks hold others up, and why.

    Looks twice at every process of a mesh, or without one of all meshes with calls under way, then at meshes for whose
    actors these wait: the endpoints that run, their stacks, and the newest collective of each process group of
    torch.distributed (from PyTorch's flight recorder, which older releases do not have for gloo). Changes and
    interrupts nothing. Blocks for half a second, once more for each mesh behind another, or up to twice `timeout`
    seconds where ranks do not answer. Raises TypeError for a value that is not a mesh, ValueError for a `timeout` that
    is not positive.
    """
    return merged([diagnosis for _, diagnosis in _diagnosed(mesh, timeout)])


def abort(mesh: "ActorMesh[Any] | ProcMesh | MeshTrait | None" = None, timeout: float = DEFAULT_TIMEOUT_S) -> Diagnosis:
    """Diagnoses as `diagnose` does, and ends the calls of this process that ranks with findings hold up.

    The calls fail with CallAbortedError, which says why. Their ranks are interrupted and freed from collectives, and
    the process groups that they waited in are abandoned on all ranks: the next call creates them again in the same
    processes. Without a finding nothing is ended. Blocks 2 s longer than `diagnose`, and raises the same errors.
    """
    diagnoses = _diagnosed(mesh, timeout)
    overall, runtime = merged([diagnosis for _, diagnosis in diagnoses]), current_runtime()
    ended, silent = list[str](), list[str]()
    for procs, diagnosis in diagnoses:
        texts = [finding.text for finding in diagnosis.findings]
        for state in (procs, *_actors_on(runtime, procs)) if texts else ():
            calls = [call for call in tuple(runtime.calls.values()) if call.mesh == state.uid and call.missing]
            ranks = sorted({rank for call in calls for rank in call.missing_ranks()})
            for call in calls:
                call.finding = ""  # it is in the text
                call.fail(CallAbortedError(f"{call.title}() was ended by abort(): {'; '.join(texts)}", overall))
                ended.append(f"{call.title}()")
            doing = interrupted(state, ranks, [call.call for call in calls]) if calls else {}
            rest = [rank for rank, run in doing.items() if run is None or (run.endpoint and not run.ended)]
            silent += [f"{places_of(procs.region, rest) or 'the only rank'} of {procs.name}"] if rest else []
    return replace(overall, ended=_ended_text(ended, silent))


def _ended_text(ended: Sequence[str], silent: Sequence[str]) -> str:
    if not ended:
        return "nothing was ended: no call of this process waits for ranks with findings"
    text = f"ended: {', '.join(ended)}"
    if silent:
        text += f"; {', '.join(silent)} did not react: heal_mesh(mesh.slice(...), kill=True) replaces ranks"
    return text


def _diagnosed(
    mesh: "ActorMesh[Any] | ProcMesh | MeshTrait | None", timeout: float
) -> list[tuple[ProcState, Diagnosis]]:
    """Diagnoses one mesh, or all meshes with calls under way, at once; blocks."""
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} is not a positive number of seconds")
    runtime = current_runtime()
    meshes = meshes_of(runtime, mesh)
    futures = [diagnosing(runtime, procs, timeout) for procs in meshes]
    return [(procs, future.get()) for procs, future in zip(meshes, futures, strict=True)]


def merged(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Merges the diagnoses of several meshes into one."""
    findings = dict.fromkeys(finding for diagnosis in diagnoses for finding in diagnosis.findings)
    inspected = "; ".join(dict.fromkeys(diagnosis.inspected for diagnosis in diagnoses))
    return Diagnosis(by_certainty(findings), inspected or "there are no meshes")


def diagnosing(
    runtime: Runtime,
    procs: ProcState,
    timeout: float = DEFAULT_TIMEOUT_S,
    patience: float = LONG_S,
    outer_waits: Sequence[AwaitedCall] = (),
    path: tuple[ProcState, ...] = (),
) -> Future[Diagnosis]:
    """Diagnoses one mesh of processes without blocking, and those for whose actors its actors wait.

    A rank that may well be working is reported only after others have waited for `patience` seconds. Actors on the
    meshes of `path` have led here, and wait for these calls, `outer_waits`.
    """
    diagnosis: Future[Diagnosis] = pending_future(describe=lambda: "looking for ranks that hold others up")

    missing = {call.call: frozenset(call.missing_ranks()) for call in _calls_of(runtime, procs)}
    first, second = _Samples(runtime, procs), _Samples(runtime, procs)

    def judge_both(before: dict[int, Evidence], after: dict[int, Evidence]) -> None:
        try:
            evidence = _evidence(runtime, procs, before, after, first, second)
            calls = [call for call in evidence.calls if call.missing == missing.get(call.call)]  # no new answers
            findings = judge(replace(evidence, calls=calls, outer_waits=outer_waits, patience=patience))
            own, way = Diagnosis(by_certainty(findings), _inspected(procs, after)), (*path, procs)
            further = [
                diagnosing(runtime, target, timeout / 2, patience, waits, way)
                for target, waits in _awaited_elsewhere(runtime, after)
                if target not in way
            ]
            when_done(settle(further, lambda: ""), lambda _: conclude(own, further))
        except Exception as error:
            fail_future(diagnosis, error)

    def conclude(own: Diagnosis, further: Sequence[Future[Diagnosis]]) -> None:
        overall = merged([own, *(future.get(0) for future in further if future.exception(0) is None)])
        for call in _calls_of(runtime, procs):
            call.finding = "; ".join(finding.line for finding in overall.findings[:MOST_NOTED])
        resolve_future(diagnosis, overall)

    def look_again(before: dict[int, Evidence]) -> None:
        within = min(SECOND_LOOK_S, timeout / 4)
        first.take(before, within, lambda: None)

        def sample(after: dict[int, Evidence]) -> None:
            second.take(after, within, lambda: judge_both(before, after))

        runtime.later(min(LOOKS_APART_S, timeout / 8), partial(_ask, runtime, procs, within, sample))

    _ask(runtime, procs, timeout / 2, look_again)
    return diagnosis


def _awaited_elsewhere(runtime: Runtime, by_rank: dict[int, Evidence]) -> Iterable[tuple[ProcState, list[AwaitedCall]]]:
    """Returns the meshes of processes for whose actors endpoints wait, as far as they are known here."""
    waits: dict[str, list[AwaitedCall]] = {}
    for wait in (wait for evidence in by_rank.values() for run in evidence.running for wait in run.waits):
        state = runtime.meshes.get(wait.mesh)
        if isinstance(state, ActorState) and state.stopped is None:
            waits.setdefault(state.procs.uid, []).append(wait)
    return [(procs, waits[procs.uid]) for procs in _procs_known(runtime) if procs.uid in waits]


class _Samples:
    """Samples of processes that have not answered, taken by the agent of each host from its system."""

    def __init__(self, runtime: Runtime, procs: ProcState) -> None:
        self._runtime, self._procs = runtime, procs
        self._by_address: dict[str, ProcSample] = {}
        self.requested_at = 0.0  # monotonic

    def of(self, rank: int) -> ProcSample:
        """Returns the sample of one process."""
        return self._by_address.get(self._procs.address(rank), ProcSample("", math.nan))

    def take(self, answered: Collection[int], within: float, callback: Callable[[], None]) -> None:
        """Calls `callback` once all agents have answered, or after `within` seconds. Does not block."""
        self.requested_at = time.monotonic()
        by_host: dict[str, list[str]] = {}
        for rank in self._procs.region.ndslice:
            host = self._procs.layout.host_of(rank)
            if rank not in answered and not operations().outage(host):
                by_host.setdefault(host, []).append(self._procs.address(rank))
        if not by_host:
            callback()
            return
        requests: list[Future[Any]] = [
            request(self._runtime, agent_of(host), host_verbs.SAMPLES, AskSamples(tuple(addresses)))
            for host, addresses in by_host.items()
        ]
        turns = iter((True,))

        def over(_: object = None) -> None:
            if next(turns, False):
                for future in requests:
                    if future.done() and future.exception(0) is None:
                        self._by_address.update(future.get(0).procs)
                callback()

        when_done(settle(requests, lambda: ""), over)
        self._runtime.later(within, over)


def meshes_of(runtime: Runtime, mesh: object) -> list[ProcState]:
    """Returns the processes of a mesh; for None all proc meshes with calls under way, or all if there are none.

    Raises TypeError for a value that is not a mesh, RuntimeError for a mesh that was stopped.
    """
    if mesh is not None:
        return [_procs_of(mesh)]
    procs = _procs_known(runtime)
    called = {call.mesh for call in tuple(runtime.calls.values())}
    busy = [
        state
        for state in procs
        if state.uid in called or any(actors.uid in called for actors in _actors_on(runtime, state))
    ]
    return busy or procs


def _procs_known(runtime: Runtime) -> list[ProcState]:
    return [state for state in tuple(runtime.meshes.values()) if isinstance(state, ProcState) and state.stopped is None]


def answers_of(
    runtime: Runtime, meshes: Iterable[ProcState], verb: Verb[Q, R], body: Q, within: float
) -> list[tuple[ProcState, dict[int, R]]]:
    """Asks all processes of meshes at once. Blocks until they have answered, or for at most `within` seconds."""
    requests = []
    for procs in meshes:
        answers: Future[dict[int, R]] = pending_future(describe=lambda: f"ranks have not answered {verb.name}")
        ranks = list(procs.region.ndslice)
        ask_ranks(runtime, procs, ranks, verb, body, partial(_answered, answers), within=within)
        requests.append((procs, answers))
    return [(procs, answers.get()) for procs, answers in requests]


def _answered(answers: Future[dict[int, R]], by_rank: dict[int, R], _: object) -> None:
    resolve_future(answers, dict(by_rank))


def _actors_on(runtime: Runtime, procs: ProcState) -> list[ActorState]:
    return [state for state in tuple(runtime.meshes.values()) if isinstance(state, ActorState) and state.procs is procs]


def _calls_of(runtime: Runtime, procs: ProcState) -> list[PendingCall[object]]:
    uids = {procs.uid, *(state.uid for state in _actors_on(runtime, procs))}
    return [call for call in tuple(runtime.calls.values()) if call.mesh in uids]


def _procs_of(mesh: object) -> ProcState:
    if isinstance(mesh, MeshTrait) and not isinstance(mesh, (ActorMesh, ProcMesh)):
        mesh = getattr(mesh, "procs", mesh)
    if not isinstance(mesh, (ActorMesh, ProcMesh)):
        raise TypeError(f"a mesh of actors, processes or tensors can be diagnosed, not {kind_of(mesh)}")
    state = state_of(mesh)
    procs = proc_state_of(state)
    if procs.stopped is not None:
        raise RuntimeError(f"{state.name} was stopped ({procs.stopped}): there is nothing to diagnose; spawn it again")
    return procs


def _ask(runtime: Runtime, procs: ProcState, within: float, done: Callable[[dict[int, Evidence]], None]) -> None:
    """Passes the evidence of the processes of a mesh that answer in time to `done`, by base rank."""
    ranks = list(procs.region.ndslice)
    ask_ranks(runtime, procs, ranks, INSPECT, Inspect(), lambda by_rank, _: done(by_rank), within=within)


def _evidence(
    runtime: Runtime,
    procs: ProcState,
    before: dict[int, Evidence],
    after: dict[int, Evidence],
    first: "_Samples",
    second: "_Samples",
) -> Procs:
    actors = _actors_on(runtime, procs)
    states, details = _states(procs)
    for state in actors:  # a breakpoint stops an actor, not its process
        states.update({rank: kind for rank, kind in _states(state)[0].items() if kind == "paused"})
    calls = [
        UnansweredCall(
            call.call,
            call.title,
            frozenset(call.missing_ranks()),
            call.size,
            time.monotonic() - call.began,
            _is_explicit(runtime, call),
        )
        for call in _calls_of(runtime, procs)
    ]
    for rank in states.keys() - after.keys():
        if states[rank] == "failed" and ", out of memory" in details.get(rank, ""):
            states[rank] = "out of memory"
        if states[rank] in ("failed", "out of memory", "paused"):
            continue
        letter = second.of(rank).letter
        if letter in STOPPED:
            states[rank] = STOPPED[letter]
        elif letter == "S" and _sleeps(runtime, procs.address(rank), rank, first, second):
            states[rank] = "asleep"
        elif outage := operations().outage(procs.layout.host_of(rank)):
            states[rank], details[rank] = "unreachable", outage

    def label(ranks: Iterable[int]) -> str:
        return places_of(procs.region, ranks) or "it"

    return Procs(procs.name, states, details, before, after, calls, where=label)


def _is_explicit(runtime: Runtime, call: PendingCall[object]) -> bool:
    cls = getattr(runtime.meshes.get(call.mesh), "cls", None)
    declared = getattr(cls, call.title.rpartition(".")[2], None)
    return isinstance(declared, EndpointProperty) and declared.explicit_response_port


def _sleeps(runtime: Runtime, address: str, rank: int, first: _Samples, second: _Samples) -> bool:
    """Returns whether a long unresponsive process uses next to no processor time; threads awaiting the GIL use some."""
    since = runtime.part(ProcessWatcher).unresponsive.get(address, math.inf)
    used, passed = second.of(rank).processor - first.of(rank).processor, second.requested_at - first.requested_at
    return time.time() - since >= LONG_S and passed >= ASLEEP_S and used < AWAKE * passed


def _states(state: MeshState) -> tuple[dict[int, str], dict[int, str]]:
    ranks = describe(state).ranks
    return {rank.rank: rank.state for rank in ranks}, {rank.rank: rank.detail for rank in ranks if rank.detail}


def _inspected(procs: ProcState, by_rank: dict[int, Evidence]) -> str:
    """Describes what was inspected, and what is not recorded."""
    running = sum(bool(evidence.running) for evidence in by_rank.values())
    text = f"{counted(len(by_rank), 'process')} of {procs.name}, {running} of them running something"
    unrecorded = [rank for rank, evidence in by_rank.items() if is_in_unrecorded(evidence)]
    return f"{text}; of {places_of(procs.region, unrecorded) or 'it'}, {UNRECORDED}" if unrecorded else text


class HangNotes:
    """Findings about one call, collected by other threads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._missing: frozenset[int] = frozenset()
        self._since = self._next = time.monotonic()
        self._pause = AGAIN_S
        self._diagnosis: Future[Diagnosis] | None = None
        self._findings: Sequence[Finding] = ()

    def findings(self, state: MeshState, missing: Sequence[int]) -> Sequence[Finding]:
        """Returns the findings about a call that awaits these base ranks; none while ranks answer. Does not block."""
        now = time.monotonic()
        if (current := frozenset(missing)) != self._missing:
            self._missing, self._since, self._pause, self._findings = current, now, AGAIN_S, ()
        procs = proc_state_of(state)
        if self._diagnosis is not None and self._diagnosis.done():
            diagnosis, self._diagnosis = self._diagnosis, None
            is_valid = diagnosis.exception(0) is None and self._waits(now)
            self._findings = diagnosis.get(0).findings if is_valid else ()
            self._pause = AGAIN_S if self._findings else min(1.5 * self._pause, MOST_AGAIN_S)
            self._next = now + self._pause
        if self._diagnosis is None and self._waits(now) and now >= self._next:
            self._diagnosis = diagnosing(self._runtime, procs, patience=WITHOUT_PROGRESS_S)
        return self._findings

    def _waits(self, now: float) -> bool:
        return bool(self._missing) and now - self._since >= WITHOUT_PROGRESS_S


class HangReport(WaitObserver):
    """Writes sure findings to stderr, each once a wait, for scripts and prompts without cells."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread = threading.local()  # the awaited call, its notes, and the texts that were written

    def tick(self, future: Future[object], seconds: float) -> None:
        """Looks for findings, and writes new ones."""
        call = self._runtime.calls.get(future.wait_id)
        state = self._runtime.meshes.get(call.mesh) if call is not None else None
        if call is None or state is None:
            return
        local = self._thread.__dict__
        if local.get("call") != call.call:
            local.update(call=call.call, notes=HangNotes(self._runtime), written=set())
        for finding in local["notes"].findings(state, call.missing_ranks()):
            written = finding.kind, finding.ranks, finding.source
            if finding.sure and written not in local["written"]:
                local["written"].add(written)
                sys.stderr.write(
                    harmless(f"monarch: {call.title}() makes no progress: {finding.line}\n")
                    + "monarch: monarch_nb.diagnosis.abort() ends it with that; the processes live on\n"
                )
