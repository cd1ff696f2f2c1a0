"""Tells front ends what has stopped and gone on, on a thread of its own, once those that step together have arrived."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from monarch_nb.debug import Stopped
from monarch_nb.debug.messages import Answer

from .adapter import Adapter
from .cluster import ClusterRanks

logger = logging.getLogger(__name__)
Message = dict[str, Any]
TOGETHER_S = 0.02  # ranks that stop within that time of each other are told of at once
LATEST_S = 0.1
OTHERS_S = 0.25  # for the others of a group that steps, once the rank that is looked at has arrived


class Announcer:
    """Listens to what is stopped. Its thread ends with the debugger."""

    def __init__(self, adapter: Adapter, ranks: ClusterRanks, tell: Callable[[Message], None]) -> None:
        self._adapter = adapter
        self._ranks = ranks
        self._tell = tell
        self._changed = threading.Event()
        self._steps: tuple[Sequence[Stopped], Sequence[Answer]] | None = None
        self._unlisten: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._held = 0
        self._telling = threading.Lock()  # who is looked at stays the same while front ends are told of it
        self._seen: Message = {}
        self.stands = False  # front ends were told of a rank that is stopped

    def listen(self) -> None:
        """To the engine of now."""
        self._unlisten()
        controller = self._ranks.controller
        if controller is not None:
            self._unlisten = controller.stopped.listen(self._happened)

    def close(self) -> None:
        """Tells nothing any more."""
        self._closed = True
        self._unlisten()
        self._changed.set()

    def _happened(self, kind: str, record: Stopped) -> None:
        if kind != "looked" and self._adapter.attached:
            self.wake()

    def wake(self) -> None:
        """Has it look soon, from any thread."""
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-dap-events", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is told meanwhile: ranks are being let go on, one after the other, or another one is looked at."""
        with self._telling:
            self._held += 1
        try:
            yield
        finally:
            with self._telling:
                self._held -= 1
            self.wake()

    def stepped(self, records: Sequence[Stopped], answers: Sequence[Answer]) -> None:
        """These step, the one that is looked at first: they are waited for before anything is told."""
        self._steps = (records, answers)

    def again(self) -> None:
        """Front ends have to hear anew of what is stopped."""
        with self._telling:
            lead = self._adapter.focus.lead(self._ranks.records())
            if lead is not None:
                self._adapter.focus.move(lead, pinned=self._adapter.focus.pinned)
        self.wake()

    def forget(self) -> None:
        """Nobody is there to be told."""
        self.stands, self._steps, self._seen = False, None, {}
        self._adapter.focus.has_gone(())

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            try:
                self._look()
            except Exception:
                logger.exception("front ends could not be told of what is stopped")

    def _is_held(self) -> bool:
        return self._held > 0

    def _look(self) -> None:
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
        with self._telling:
            if self._is_held():  # meanwhile
                return
            for event in self._adapter.events():
                self.stands = event["event"] == "stopped"
                self._tell(event)
        if not self._adapter.attached:
            return
        seen, self._seen = self._seen, self._adapter.overview()
        if seen != self._seen:  # who asks has this look again, and is not to be told to ask again
            self._tell({"event": "monarchThreads", "body": {}})
