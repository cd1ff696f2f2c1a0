"""Search for the reason why a call makes no progress while a thread waits for it, without a request."""

import sys
import threading
import time
from collections.abc import Sequence

from monarch_nb.diagnosis.collector import diagnosing
from monarch_nb.diagnosis.findings import Diagnosis, Finding
from monarch_nb.runtime import Future, MeshState, Runtime, WaitObserver, proc_state_of
from monarch_nb.wire import harmless

WITHOUT_PROGRESS_S = 10.0  # until the reason is looked for
AGAIN_S, MOST_AGAIN_S = 5.0, 20.0  # until the next look, at first and finally: a call may rightly take hours


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
