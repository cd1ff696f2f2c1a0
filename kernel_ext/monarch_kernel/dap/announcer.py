"""Sends stopped and continued events to front ends, on its own thread, once ranks that step together have stopped."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from monarch_nb.debug import Stopped
from monarch_nb.debug.verbs import CommandAnswer

from .adapter import Adapter
from .cluster import ClusterRanks

logger = logging.getLogger(__name__)
Message = dict[str, Any]
TOGETHER_S = 0.02  # ranks that stop within this time of each other are announced together
LATEST_S = 0.1
OTHERS_S = 0.25  # for the rest of a group that steps, once the rank in focus has stopped


class Announcer:
    """Watches the list of stopped ranks. Its thread ends with the debugger."""

    def __init__(self, adapter: Adapter, ranks: ClusterRanks, send: Callable[[Message], None]) -> None:
        self._adapter = adapter
        self._ranks = ranks
        self._send = send
        self._changed = threading.Event()
        self._steps: tuple[Sequence[Stopped], Sequence[CommandAnswer]] | None = None
        self._unlisten: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._hold_count = 0
        self._sending = threading.Lock()  # keeps the focus unchanged while events are sent
        self._overview: Message = {}
        self.shows_stopped = False  # the last event sent to front ends was `stopped`

    def listen(self) -> None:
        """Subscribes to the current runtime's list of stopped ranks."""
        self._unlisten()
        controller = self._ranks.controller
        if controller is not None:
            self._unlisten = controller.stopped.listen(self._on_change)

    def close(self) -> None:
        """Ends the thread; no event is sent afterwards."""
        self._closed = True
        self._unlisten()
        self._changed.set()

    def _on_change(self, kind: str, record: Stopped) -> None:
        if kind != "looked" and self._adapter.attached:
            self.wake()

    def wake(self) -> None:
        """Requests an update of front ends, from any thread."""
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-dap-events", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Blocks events while ranks are being resumed one after the other, or while the focus changes."""
        with self._sending:
            self._hold_count += 1
        try:
            yield
        finally:
            with self._sending:
                self._hold_count -= 1
            self.wake()

    def stepped(self, records: Sequence[Stopped], answers: Sequence[CommandAnswer]) -> None:
        """Records a step of these ranks, the one in focus first: the next event waits for them."""
        self._steps = (records, answers)

    def resend(self) -> None:
        """Sends the state of stopped ranks to front ends again."""
        with self._sending:
            lead = self._adapter.focus.lead(self._ranks.records())
            if lead is not None:
                self._adapter.focus.move(lead, pinned=self._adapter.focus.pinned)
        self.wake()

    def forget(self) -> None:
        """Resets the state that front ends were sent, when the debugger is switched off."""
        self.shows_stopped, self._steps, self._overview = False, None, {}
        self._adapter.focus.has_resumed(())

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            try:
                self._publish()
            except Exception:
                logger.exception("stopped ranks could not be announced to front ends")

    def _is_held(self) -> bool:
        return self._hold_count > 0

    def _publish(self) -> None:
        controller = self._ranks.controller
        if controller is None or self._is_held():
            return
        steps, self._steps = self._steps, None
        if steps is not None:
            records, answers = steps
            controller.await_stops(records[:1], answers[:1])
            controller.await_stops(records, answers, OTHERS_S)
        else:
            controller.stopped.settle(TOGETHER_S, LATEST_S)
        with self._sending:
            if self._is_held():  # since the check above
                return
            for event in self._adapter.events():
                self.shows_stopped = event["event"] == "stopped"
                self._send(event)
        if not self._adapter.attached:
            return
        previous, self._overview = self._overview, self._adapter.overview()
        if previous != self._overview:  # a request wakes this thread; unchanged state must not cause another one
            self._send({"event": "monarchThreads", "body": {}})
