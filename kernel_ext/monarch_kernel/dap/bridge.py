"""Debug requests of front ends on the control channel, routed to the mesh's adapter or to the kernel's own debugger."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from monarch_nb.debug import DebugError
from monarch_nb.debug.render import named
from monarch_nb.runtime import Actor, Runtime
from monarch_nb.settings import settings

from ..jupyter import (
    cell_name,
    forward_own_events,
    keep_empty_lines,
    leave_threads_running,
    own_debug_request,
    own_debugger,
    send_debug_event,
    take_debug_requests,
)
from .adapter import Adapter
from .announcer import Announcer
from .cluster import ClusterRanks
from .inspection import CellSources, Message, RequestRefused, is_ours

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

logger = logging.getLogger(__name__)
ANSWER_S = 8.0  # for an answer: the kernel takes no other control message while it waits
_MOTIONS = ("continue", "next", "stepIn", "stepOut")
_OF_A_THREAD = (*_MOTIONS, "stackTrace", "exceptionInfo")
_OF_A_NUMBER = {"scopes": "frameId", "variables": "variablesReference", "setVariable": "variablesReference"}
_OF_A_FRAME = {"evaluate": "frameId", "richInspectVariables": "frameId", "copyToGlobals": "srcFrameId"}
_OF_THE_KERNEL = ("inspectVariables", "modules")


class Presence:
    """Watches whether the page that stopped ranks is still open. A page that never sends a heartbeat, as without the
    JupyterLab extension, counts as open.
    """

    def __init__(self, holds: Callable[[], bool], lost: Callable[[float], None]) -> None:
        """`holds()`: whether the page has stopped any rank; `lost(seconds)` is called, on a thread, when the page has
        been silent for that long while it does.
        """
        self._holds = holds
        self._lost = lost
        self._last_seen = 0.0
        self._changed = threading.Condition()
        self._watched = False

    def beat(self) -> float:
        """Records a heartbeat. Returns the seconds within which the next one is due."""
        with self._changed:
            self._last_seen = time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="monarch-dap-presence", daemon=True).start()
        return settings.debug_page_lease

    def request_received(self) -> None:
        """Records that the page has sent a request."""
        self._last_seen = time.monotonic()

    def forget(self) -> None:
        """Stops watching."""
        with self._changed:
            self._watched = False
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while self._watched and self._holds():
                silent = time.monotonic() - self._last_seen
                if silent >= settings.debug_page_lease:
                    break
                self._changed.wait(settings.debug_page_lease - silent)
            else:  # the next heartbeat starts another watch
                self._watched = False
                return
            self._watched = False
        self._lost(silent)


class OwnDebugger:
    """ipykernel's debugger, where debugpy is installed. All its requests are made on the loop of the control thread."""

    def __init__(self, kernel: Any, on_event: Callable[[Message], None], idle: Callable[[], bool]) -> None:
        """`on_event` is called with its events; `idle()` is true while no cell runs: only then can it be started."""
        self._kernel = kernel
        self._debugger = own_debugger(kernel)
        self._on_event = on_event
        self._idle = idle
        self._seq = 1 << 20
        self.stopped = False  # it has stopped the notebook's code
        self._undo = [forward_own_events(kernel, self._received)]
        if self.started:
            self._spare_runtime()

    def close(self) -> None:
        """Restores the kernel's own way of sending events."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _spare_runtime(self) -> None:
        """Keeps the runtime's threads running while the notebook's code is stopped: other hosts would call it lost."""
        if len(self._undo) == 1:
            self._undo.append(leave_threads_running("monarch"))

    @property
    def exists(self) -> bool:
        """True where debugpy is installed."""
        return self._debugger is not None

    @property
    def started(self) -> bool:
        """True while it runs, which makes the notebook's code slower."""
        return bool(getattr(self._debugger, "is_started", False))

    @property
    def breakpoints(self) -> dict[str, list[Message]]:
        """Its breakpoints, by file."""
        by_file: dict[str, list[Message]] = getattr(self._debugger, "breakpoint_list", {})
        return {path: list(rows) for path, rows in by_file.items()}

    def _received(self, event: Message) -> None:
        if event.get("event") == "stopped":
            self.stopped = True
        elif event.get("event") in ("continued", "terminated"):
            self.stopped = False
        self._on_event(event)

    async def request(self, message: Message) -> Message | None:
        """Its answer; None where there is no debugger."""
        answer = await own_debug_request(self._kernel, message)
        if answer is not None and message["command"] in ("continue", "disconnect"):
            self.stopped = False
        return answer

    async def do(self, command: str, arguments: Message | None = None) -> Message:
        """Sends a request of our own; empty where there is no debugger."""
        self._seq += 1
        message = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments or {}}
        return await self.request(message) or {}

    async def start(self) -> bool:
        """Starts it. False where that is not possible now: while a cell runs the kernel would wait for its end."""
        if self.started:
            return True
        if not self.exists or not self._idle():
            return False
        self._spare_runtime()
        client = {"clientID": "monarch", "adapterID": "python", "pathFormat": "path"}
        started = await self.do("initialize", {**client, "linesStartAt1": True, "columnsStartAt1": True})
        return bool(started.get("success")) and bool((await self.do("attach")).get("success"))


class DebugBridge:
    """Debugger of one kernel. Requests for the mesh are answered at once, also while a cell runs; the kernel's own
    debugger is started when a breakpoint is set in code that the notebook itself runs.
    """

    def __init__(
        self,
        shell: "InteractiveShell",
        runtime: Callable[[], Runtime | None],
        idle: Callable[[], bool],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`idle()` is true while no cell runs; `say` prints a message in the cell."""
        self._say = say
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)
        self._idle = idle
        self._sources = CellSources()
        ranks = ClusterRanks(runtime)
        self.adapter = Adapter(
            ranks,
            self._sources.text,
            name=self._file_name,
            is_actor=self._is_actor,
            named_here=self._sources.named_here,
        )
        self.announcer = Announcer(self.adapter, ranks, self._send)
        self._presence = Presence(self._holds, self._on_page_lost)
        self._pool = ThreadPoolExecutor(1, "monarch-dap")
        self._own: OwnDebugger | None = None
        self._adopts = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending_files: set[str] = set()  # files whose breakpoints the kernel's own debugger has not got yet
        self._handing = asyncio.Lock()
        self._seq = 0
        self._undo: list[Callable[[], None]] = []
        self._requests: dict[str, Callable[[Message, Message], Awaitable[Message]]] = {
            "debugInfo": self._debug_info,
            "monarchAlive": self._monarch_alive,
            "dumpCell": self._dump_cell,
            "attach": self._attach,
            "disconnect": self._disconnect,
            "setBreakpoints": self._set_breakpoints,
            "setExceptionBreakpoints": self._set_exception_breakpoints,
            "pause": self._pause,
        }

    # -- install and uninstall -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Takes over debug requests of the kernel, where there is one. Runs before the runtime's threads start: the
        kernel's own debugger may run already.
        """
        if not hasattr(self._kernel, "do_debug_request"):
            return
        self._own = OwnDebugger(self._kernel, self._own_event, self._idle)
        self._undo = [take_debug_requests(self._kernel, self.handle), self._own.close]
        self._adopts = self._own.started  # the bug button was pressed before the extension was loaded

    def uninstall(self) -> None:
        """Gives requests back to the kernel; breakpoints of the mesh are removed and stopped ranks resume."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self.adapter.attached:
            self.adapter.answer("disconnect", {})
        self.announcer.close()
        self._presence.forget()
        self._pool.shutdown(wait=False)

    def attach(self, runtime: Runtime) -> None:
        """Connects to a new runtime."""
        self.announcer.listen()
        if self._adopts:
            self._adopts = False
            threading.Thread(target=self._adopt, name="monarch-dap-adopt", daemon=True).start()

    def _adopt(self) -> None:
        """Takes over breakpoints that the kernel's own debugger received before."""
        assert self._own is not None
        for path, lines in self._own.breakpoints.items():
            self.adapter.gutter.set(path, lines)
        self.adapter.inspection.client = "jupyterlab"
        self.adapter.answer("attach", {})

    # -- requests (the loop of the control thread) ---------------------------------------------------------------------

    async def handle(self, message: Message) -> Message | None:
        """Returns the response to a request, within a bounded time."""
        self._loop = asyncio.get_running_loop()
        self._presence.request_received()
        command = str(message.get("command") or "")
        arguments: Message = message.get("arguments") or {}
        try:
            answer = await asyncio.wait_for(self._route(command, arguments, message), ANSWER_S)
        except (RequestRefused, DebugError, LookupError, ValueError, TypeError) as error:
            return self._reply(message, None, str(error.args[0]) if error.args else str(error))
        except TimeoutError:
            return self._reply(message, None, f"no answer within {ANSWER_S:g} s: a rank does not respond")
        except Exception as error:
            logger.exception("the debug request %s could not be answered", command)
            return self._reply(message, None, f"{type(error).__name__}: {error}")
        is_complete = "success" in answer or "request_seq" in answer or "body" in answer  # as the kernel itself answers
        return answer if is_complete else self._reply(message, answer)

    def _reply(self, message: Message, body: Message | None, error: str = "") -> Message:
        self._seq += 1
        response = {
            "type": "response",
            "seq": self._seq,
            "request_seq": message.get("seq", 0),
            "command": message.get("command", ""),
            "success": not error,
            "body": body or {},
        }
        return {**response, "message": error} if error else response

    async def _ours(self, command: str, arguments: Message) -> Message:
        """Returns the adapter's answer, computed on a thread because it blocks for answers of ranks."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(self.adapter.answer, command, arguments))

    async def _route(self, command: str, arguments: Message, message: Message) -> Message:
        assert self._own is not None
        handler = self._requests.get(command)
        if handler is not None:
            return await handler(arguments, message)
        if self._is_own(command, arguments) and self._own.exists:
            return await self._own.request(message) or {}
        if command in _MOTIONS:
            return await self._go(command, arguments)
        if command == "monarchFocus":
            with self.announcer.hold():
                return await self._ours(command, arguments)
        body = await self._ours(command, arguments)
        self.announcer.wake()  # the focus may have moved
        return body

    def _is_own(self, command: str, arguments: Message) -> bool:
        """Returns whether the request is for the kernel's own debugger, by its numbers, or by the stopped threads."""
        assert self._own is not None
        if command in _OF_A_NUMBER:
            return not is_ours(arguments.get(_OF_A_NUMBER[command]))
        if command in _OF_A_FRAME and arguments.get(_OF_A_FRAME[command]) is not None:
            return not is_ours(arguments[_OF_A_FRAME[command]])
        if command in _OF_A_THREAD:
            return self._own.stopped
        if command in _OF_A_FRAME:
            return self._own.stopped or not self.adapter.ranks.records()
        return command in _OF_THE_KERNEL

    async def _go(self, command: str, arguments: Message) -> Message:
        loop = asyncio.get_running_loop()
        with self.announcer.hold():
            targets, answers = await loop.run_in_executor(self._pool, self.adapter.go, command, arguments)
            if command != "continue":
                self.announcer.stepped(targets, answers)
        return {"allThreadsContinued": False} if command == "continue" else {}

    async def _debug_info(self, arguments: Message, message: Message) -> Message:
        by_file: dict[str, list[Message]] = {}
        for path, mark in self.adapter.gutter:
            by_file.setdefault(path, []).append({"line": mark.line.number})
        # VS Code resumes every thread listed here; a page without a debugger would switch it on.
        visible = self.adapter.attached and self.adapter.client == "jupyterlab"
        return {
            "isStarted": self.adapter.attached,
            **self._sources.info(),
            "breakpoints": [{"source": path, "breakpoints": rows} for path, rows in by_file.items()],
            "stoppedThreads": [1] if visible and (self.announcer.shows_stopped or self._own_stopped) else [],
            "richRendering": True,
            "exceptionPaths": ["Python Exceptions"],
            "copyToGlobals": True,
        }

    @property
    def _own_stopped(self) -> bool:
        return self._own is not None and self._own.stopped

    async def _monarch_alive(self, arguments: Message, message: Message) -> Message:
        """Heartbeat of the page, due again within `seconds` while a rank is stopped."""
        return {"seconds": self._presence.beat()}

    def _holds(self) -> bool:
        return self.adapter.attached and any(record.blocks_actor for record in self.adapter.ranks.records())

    def _on_page_lost(self, silent: float) -> None:
        """Resumes stopped ranks whose page has closed."""
        stopped = [record for record in self.adapter.ranks.records() if record.blocks_actor]
        if self._loop is None or not stopped:
            return
        self._say(
            f"» JupyterLab's debugger has stopped {named(stopped)}, and its page was silent for {silent:.0f} s "
            "(debug_page_lease): all go on, and the debugger is off\n"
        )
        message = {"type": "request", "seq": 0, "command": "disconnect", "arguments": {}}
        asyncio.run_coroutine_threadsafe(self.handle(message), self._loop)

    async def _dump_cell(self, arguments: Message, message: Message) -> Message:
        return {"sourcePath": self._sources.dump(str(arguments.get("code") or ""))}

    async def _attach(self, arguments: Message, message: Message) -> Message:
        self._undo.append(keep_empty_lines(self._shell))
        body = await self._ours("attach", arguments)
        self._send({"event": "initialized"})
        self.announcer.wake()
        return body

    async def _disconnect(self, arguments: Message, message: Message) -> Message:
        assert self._own is not None
        try:
            return await self._ours("disconnect", arguments)
        finally:  # also where a rank did not answer
            if self._own.started:
                await self._own.request(message)
            for undo in self._undo[2:]:
                undo()
            del self._undo[2:]
            self._pending_files.clear()
            self._presence.forget()
            self.announcer.forget()
            self._send({"event": "terminated"})

    async def _set_breakpoints(self, arguments: Message, message: Message) -> Message:
        assert self._own is not None
        body = await self._ours("setBreakpoints", arguments)
        self.announcer.wake()
        path = str((arguments.get("source") or {}).get("path") or "")
        if self.adapter.gutter.of_notebook(path) or self._own.started:
            self._pending_files.add(path)
            await self._hand_over()
        return body

    async def _set_exception_breakpoints(self, arguments: Message, message: Message) -> Message:
        body = await self._ours("setExceptionBreakpoints", arguments)
        if self._own is not None and self._own.started:
            await self._own.request(message)
        return body

    async def _pause(self, arguments: Message, message: Message) -> Message:
        if self._own is not None and self._own.started:
            return await self._own.request(message) or {}
        return await self._ours("pause", arguments)

    async def _hand_over(self) -> None:
        """Gives the kernel's own debugger its breakpoints, once it can be started."""
        assert self._own is not None
        async with self._handing:  # its start ends a cell, which calls this again
            if self.adapter.attached and await self._own.start():
                await self._hand(self._own)

    async def _hand(self, own: OwnDebugger) -> None:
        while self._pending_files:
            path = self._pending_files.pop()
            rows = self.adapter.gutter.of_notebook(path)
            request = {"source": {"path": path}, "breakpoints": rows, "sourceModified": False}
            await own.do("setBreakpoints", request)

    def cell_ends(self) -> None:
        """Runs at the end of each cell, on its thread: does what had to wait for an idle kernel."""
        if self._pending_files and self._loop is not None and self.adapter.attached:
            asyncio.run_coroutine_threadsafe(self._hand_over(), self._loop)

    # -- events --------------------------------------------------------------------------------------------------------

    def _send(self, event: Message) -> None:
        self._seq += 1
        send_debug_event(self._kernel, {"type": "event", "seq": self._seq, **event})

    def _own_event(self, event: Message) -> None:
        """Returns an event of the kernel's own debugger, on the control thread."""
        if event.get("event") == "initialized":
            return  # front ends have the adapter's own `initialized`
        send_debug_event(self._kernel, event)
        if event.get("event") == "continued":
            self.announcer.resend()  # stopped ranks are visible again

    # -- names ---------------------------------------------------------------------------------------------------------

    def _file_name(self, file: str) -> str:
        return cell_name(self._shell, self._sources.named_here(file)) or file.rpartition("/")[2]

    def _is_actor(self, name: str) -> bool:
        """Returns whether a class of the notebook is an actor class."""
        value: Any = self._shell.user_ns.get(name.partition(".")[0])
        for part in name.split(".")[1:]:
            value = getattr(value, part, None)
        return isinstance(value, type) and issubclass(value, Actor)
