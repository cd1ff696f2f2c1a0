"""Progress in a waiting cell: after two seconds the ranks that have answered, and the activity of the others; and the
package, such as torch, that the answer imports while it is decoded.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from types import FrameType
from typing import Any

from monarch_nb.diagnosis.collector import HangNotes
from monarch_nb.diagnosis.findings import Finding
from monarch_nb.lifecycle.interrupts import doing
from monarch_nb.runtime import Future, MeshState, PendingCall, RunningEndpoint, Runtime, waiting
from monarch_nb.shape import places_of
from monarch_nb.store import describe
from monarch_nb.wire import decode

from .front import Front, TransientLines
from .interrupted_calls import call_text, grouped, ranks_text
from .output import CellOutput

AFTER_SECONDS = 2.0
EVERY_SECONDS = 0.5
ASK_SECONDS = 1.0  # between two requests for the activity of ranks
SILENT_SECONDS = 10.0  # the same for ranks that have not answered
MOST_ASKED = 64
TERMINAL_EVERY_SECONDS = 30.0  # where lines cannot be replaced
MOST_FINDINGS = 4
IMPORT_SECONDS = 1.0  # an import that takes longer is shown
LOOKS_EVERY = 0.1  # seconds between two looks at such an import


class CallProgress(waiting.WaitObserver):
    """Called by `Future.get` each tick, on the waiting thread."""

    explains_long_waits = True

    def __init__(self, front: Front, runtime: Runtime, output: CellOutput, has_panel: Callable[[], bool]) -> None:
        """`has_panel()` says whether a page can be asked to open its panel."""
        self._front = front
        self._has_panel = has_panel
        self._runtime = runtime
        self._output = output
        self._line = TransientLines(front)
        self._button = TransientLines(front)  # a separate display: replacing a button would lose a click on it
        self._next = self._next_lines = 0.0
        self._busy = _Busy()
        self._hang = HangNotes(runtime)
        self._findings: Sequence[Finding] = ()

    def tick(self, future: Future[object], seconds: float) -> None:
        """Shows how far a call is."""
        if seconds < AFTER_SECONDS or not self._front.in_cell:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        call = self._runtime.calls.get(future.wait_id)
        is_new = self._update_findings(call)
        if self._front.has_displays:
            self._line.show(self._text(future, seconds))
        elif now >= self._next_lines or is_new:
            self._next_lines = now + TERMINAL_EVERY_SECONDS
            self._front.write(f"{self._text(future, seconds)}\n", "stderr")
        if call is not None and self._has_panel():
            self._button.show("", _why_button(call.mesh))

    def _update_findings(self, call: PendingCall[object] | None) -> bool:
        """Updates the reasons why a call makes no progress. Returns whether there is a new one."""
        before = {(finding.kind, finding.ranks) for finding in self._findings}
        state = self._runtime.meshes.get(call.mesh) if call is not None else None
        findings = self._hang.findings(state, call.missing_ranks()) if call is not None and state is not None else ()
        self._findings = findings[:MOST_FINDINGS]
        return not before.issuperset((finding.kind, finding.ranks) for finding in self._findings)

    def begin(self, future: Future[object], timeout: float | None) -> Callable[[], None] | None:
        """Called when a wait begins; returns what ends it: the line is removed, and output of ranks is shown first."""
        if not self._front.in_cell:
            return None
        if not _awaited():
            return self._finish
        ticking = _Ticking(lambda seconds: self.tick(future, seconds))

        def finish() -> None:
            ticking.end()
            self._finish()

        return finish

    def no_wait(self) -> None:
        """Shows earlier output of ranks: the result is there without a wait, and output comes before all else."""
        if self._front.in_cell:
            self._output.settle_replies()

    def _finish(self) -> None:
        if self._next:
            self._next = self._next_lines = 0.0
            self._line.clear()
            self._button.clear()
            self._busy = _Busy()
            self._hang, self._findings = HangNotes(self._runtime), ()
        self._output.settle_lines()

    def _text(self, future: Future[Any], seconds: float) -> str:
        description = future.progress_text() or "waiting"
        lines = [f"⏳ {_duration(seconds)} · {description}"]
        call = self._runtime.calls.get(future.wait_id)
        state = self._runtime.meshes.get(call.mesh) if call is not None else None
        if call is not None and state is not None and call.size > 1:
            missing = call.missing_ranks()
            if 0 < len(missing) < 10_000:
                lines.append(f"   missing: {_places(state, missing)}")
            lines += [f"   {text}" for text in self._unusual(state, missing)]
        if call is not None and state is not None:
            lines += [f"   {text}" for text in self._busy.lines(state, call.missing_ranks(), call.call)]
            lines += [f"   {finding.line}" for finding in self._findings]
        bars = self._output.progress()
        if bars:
            lines += [f"   {bar}" for bar in bars.splitlines()[:16]]
        return "\n".join(lines)

    def _unusual(self, state: MeshState, missing: list[int]) -> list[str]:
        by_state: dict[str, list[int]] = {}
        for rank in describe(state).ranks:
            if rank.rank in missing and rank.state not in ("idle", "busy"):
                by_state.setdefault(rank.state, []).append(rank.rank)
        return [f"{condition}: {_places(state, ranks)}" for condition, ranks in by_state.items()]


def _why_button(uid: str) -> str:
    """Returns a button with which JupyterLab runs the panel's command `why`."""
    arguments = escape(json.dumps({"mesh": uid}))
    return (
        '<button class="jp-mod-styled" style="margin: 2px 8px" title="which ranks hold the others up, in the panel" '
        f'data-commandlinker-command="monarch-nb:why" data-commandlinker-args="{arguments}">Why?</button>'
    )


class _Busy:
    """Activity of ranks that a call waits for, polled now and then."""

    def __init__(self) -> None:
        self._request: Future[dict[int, RunningEndpoint]] | None = None
        self._request_time = 0.0
        self._request_ranks: list[int] = []
        self._running: dict[int, tuple[RunningEndpoint, float]] = {}  # by base rank, and when it began
        self._silent: dict[int, float] = {}  # base ranks that did not answer, and when they are asked again
        self._next = 0.0

    def lines(self, state: MeshState, ranks: list[int], call: str) -> list[str]:
        """Texts about those of `ranks` that run another call, with its start."""
        now = time.time()
        if self._request is not None and self._request.done():
            answers, self._request = self._request.get(0), None
            self._running.update({rank: (work, self._request_time - work.seconds) for rank, work in answers.items()})
            self._silent.update({rank: now + SILENT_SECONDS for rank in self._request_ranks if rank not in answers})
        if now >= self._next and self._request is None and len(ranks) <= MOST_ASKED:
            self._next, self._request_time = now + ASK_SECONDS, now
            self._request_ranks = [rank for rank in ranks if self._silent.get(rank, 0.0) <= now]
            if self._request_ranks:
                self._request = doing(state, self._request_ranks)
        running = {rank: self._running[rank] for rank in ranks if rank in self._running}
        since = {rank: begun for rank, (work, begun) in running.items() if work.call and work.call != call}
        groups = grouped({rank: running[rank][0] for rank in since}, lambda work: (work.endpoint, work.call))
        lines = []
        for work, busy in groups:
            begun = min(since[rank] for rank in busy)
            clock = time.strftime("%H:%M:%S", time.localtime(begun))
            lines.append(
                f"{ranks_text(state, busy)} busy with {call_text(state, work.endpoint)} since {clock} "
                f"({_duration(now - begun)}); %interrupt {state.name} ends it"
            )
        return lines


def _awaited() -> bool:
    """Returns whether the guard was entered by `await`, and not by a blocking wait."""
    frame = sys._getframe(2)
    for _ in range(2):  # up to Python 3.11 a comprehension has a frame of its own
        if frame.f_code is Future.__await__.__code__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class _Ticking:
    """Wakes the kernel's loop now and then: ipykernel's own handling of Ctrl-C in `await` does not."""

    def __init__(self, tick: Callable[[float], None]) -> None:
        self._tick = tick
        self._begun = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(waiting.TICK, self._on_timer)

    def _on_timer(self) -> None:
        self._tick(time.monotonic() - self._begun)
        self._handle = self._loop.call_later(waiting.TICK, self._on_timer)

    def end(self) -> None:
        self._handle.cancel()


def _places(state: MeshState, ranks: list[int]) -> str:
    return places_of(state.region, ranks) or "its rank"


def _duration(seconds: float) -> str:
    total = int(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


class ImportNotices:
    """A module finder that finds nothing: it notes the first package that is imported while an answer is decoded."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._reading = False

    def install(self) -> None:
        """Starts to report such imports."""
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Stops."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by each import of a module that is not loaded yet."""
        if "." in name or self._reading or not self._front.in_cell or not _reads(sys._getframe()):
            return
        self._reading = True
        threading.Thread(target=self._watch, args=(name,), name="monarch-import", daemon=True).start()

    def _watch(self, name: str) -> None:
        line, ended, main = TransientLines(self._front), threading.Event(), threading.main_thread().ident
        waited = 0.0
        try:
            while (frame := sys._current_frames().get(main or 0)) is not None and _reads(frame):
                ended.wait(LOOKS_EVERY)
                waited += LOOKS_EVERY
                if waited >= IMPORT_SECONDS:
                    line.show(f"⏳ the answer is here; reading it imports {name} into this kernel, once")
        finally:
            line.clear()
            self._reading = False


def _reads(frame: FrameType | None) -> bool:
    """True within the decoding of an answer."""
    while frame is not None:
        if frame.f_code is decode.__code__:
            return True
        frame = frame.f_back
    return False
