"""Exceptions of the debugger."""

from typing import Any

from monarch_nb.wire import ThreadCutOff


class StoppedAtBreakpoint(RuntimeError):
    """A call waits for ranks that are stopped in the debugger, and there is no prompt to ask what to do.

    They stay stopped and the call goes on: debug them (`%%mdb`, `monarch.debug`), then `.get()` again. `sessions` are
    their records, `table` is what a prompt would have shown.
    """

    def __init__(self, message: str, sessions: Any = (), table: str = "") -> None:
        super().__init__(message)
        self.sessions = tuple(sessions)
        self.table = table


class DebugError(RuntimeError):
    """A command for stopped ranks cannot be carried out; the text says why and what can be done."""


class QuitDebugger(KeyboardInterrupt):
    """Ends the endpoint of a stopped rank, which was asked to quit; as an interrupt does, past `except Exception`."""


class CommandTimeout(ThreadCutOff):
    """Breaks off a command that takes too long, on the stopped thread."""
