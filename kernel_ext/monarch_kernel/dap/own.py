"""The kernel's own debugger, for code that the notebook itself runs; started when a breakpoint is set in such code."""

from collections.abc import Callable
from typing import Any

from ..jupyter import hear_own_events, leave_threads_running, own_debug_request, own_debugger

Message = dict[str, Any]


class OwnDebugger:
    """ipykernel's, where debugpy is installed. All its requests are made on the loop of the control thread."""

    def __init__(self, kernel: Any, hear: Callable[[Message], None], idle: Callable[[], bool]) -> None:
        """`hear` is called with its events; `idle` says whether no cell runs: it can be started only then."""
        self._kernel = kernel
        self._debugger = own_debugger(kernel)
        self._hear = hear
        self._idle = idle
        self._seq = 1 << 20
        self.stopped = False  # it has stopped the notebook's code
        self._undo = [hear_own_events(kernel, self._heard)]
        if self.started:
            self._spare_engine()

    def close(self) -> None:
        """Front ends hear it without us again."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _spare_engine(self) -> None:
        """The engine must go on while the notebook's code is stopped: other hosts would take it for lost."""
        if len(self._undo) == 1:
            self._undo.append(leave_threads_running("monarch"))

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self._debugger is not None

    @property
    def started(self) -> bool:
        """Whether it runs, which makes the notebook's code slower."""
        return bool(getattr(self._debugger, "is_started", False))

    @property
    def breakpoints(self) -> dict[str, list[Message]]:
        """Those that it has, by file."""
        kept: dict[str, list[Message]] = getattr(self._debugger, "breakpoint_list", {})
        return {path: list(rows) for path, rows in kept.items()}

    def _heard(self, event: Message) -> None:
        if event.get("event") == "stopped":
            self.stopped = True
        elif event.get("event") in ("continued", "terminated"):
            self.stopped = False
        self._hear(event)

    async def request(self, message: Message) -> Message | None:
        """What it answers; None where there is none."""
        answer = await own_debug_request(self._kernel, message)
        if answer is not None and message["command"] in ("continue", "disconnect"):
            self.stopped = False
        return answer

    async def do(self, command: str, arguments: Message | None = None) -> Message:
        """The same for requests of our own."""
        self._seq += 1
        message = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments or {}}
        return await self.request(message) or {}

    async def start(self) -> bool:
        """Has it run; False where it cannot be started now. While a cell runs the kernel would wait for its end."""
        if self.started:
            return True
        if not self.exists or not self._idle():
            return False
        self._spare_engine()
        told = {"clientID": "monarch", "adapterID": "python", "pathFormat": "path"}
        begun = await self.do("initialize", {**told, "linesStartAt1": True, "columnsStartAt1": True})
        return bool(begun.get("success")) and bool((await self.do("attach")).get("success"))
