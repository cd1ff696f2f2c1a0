"""A real kernel, driven as a front end drives it."""

import contextlib
import os
import queue
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from tests.ports import kernel_ports

# The same tests can run with another interpreter's kernel, such as one with the versions of a hosted notebook.
PYTHON = os.environ.get("MONARCH_TEST_KERNEL") or sys.executable
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    stdout: str = ""
    stderr: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return str(self.result.get("text/plain", ""))

    @property
    def html(self) -> str:
        return str(self.result.get("text/html", ""))

    @property
    def traceback(self) -> str:
        return ANSI.sub("", "\n".join(self.error["traceback"])) if self.error else ""

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The displays, without the note of a call that takes long, which only a slow machine shows."""
        return [display for display in self.displays if not display.get("text/plain", "").startswith("⏳")]

    def ok(self) -> "Cell":
        assert self.error is None, self.traceback
        assert not self.stderr.startswith("UsageError"), self.stderr
        return self


class Notebook:
    """One kernel with the extension loaded."""

    def __init__(self, *, load: bool = True, python: str = PYTHON, folder: Path | None = None) -> None:
        self._changes: dict[str, list[dict[str, Any]]] = {}  # of displays that were skipped, by request
        self.manager = KernelManager(kernel_name="python3", **kernel_ports())
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        spec = self.manager.kernel_spec
        assert spec is not None
        spec.argv = [python, "-m", "ipykernel", "-f", "{connection_file}"]
        self.manager.start_kernel(env=env, cwd=str(folder or Path.cwd()))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)
        self.pid = int(self.run("import os; os.getpid()").text)
        if load:
            self.run("%load_ext monarch").ok()

    def restart(self) -> None:
        """Restarts the kernel, as a front end does; then loads the extension again."""
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=30)
        self.pid = int(self.run("import os; os.getpid()").text)
        self.run("%load_ext monarch").ok()

    def start(self, source: str, *, asks: bool = False) -> str:
        # Old kernels refuse for a moment what comes right after an error, unless they are told not to.
        return str(self.client.execute(source, allow_stdin=asks, stop_on_error=False))

    def run(self, source: str, timeout: float = 60) -> Cell:
        return self.finish(self.start(source), timeout)

    def aside(self, source: str) -> Cell:
        """Runs code that is no cell of the notebook, and has no number."""
        return self.finish(str(self.client.execute(source, store_history=False, stop_on_error=False))).ok()

    def finish(self, request: str, timeout: float = 60) -> Cell:
        """Reads until the cell is done."""
        cell = Cell()
        deadline = time.monotonic() + timeout
        while True:
            message = self._next(request, deadline)
            if self._take(cell, message):
                break
        self._reply(request, deadline)
        return cell

    def until(self, request: str, cell: Cell, text: str, timeout: float = 15) -> Cell:
        """Reads until the cell has shown a text, and goes on running."""
        deadline = time.monotonic() + timeout
        while text not in cell.stdout + cell.stderr + str(cell.displays) + str(cell.updates):
            assert not self._take(cell, self._next(request, deadline)), f"ended without {text!r}: {cell}"
        return cell

    def next_message(self, request: str, kind: str, timeout: float = 15) -> dict[str, Any]:
        """The next message of a kind for a cell that is done already."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._next(request, deadline)
            if message["msg_type"] == kind:
                return dict(message["content"])

    def shows(self, request: str, part: str, timeout: float = 15) -> str:
        """The next change of a display with this text in it, in a cell that is done already."""
        deadline = time.monotonic() + timeout
        text = ""
        while part not in text:
            if not (changes := self._changes.get(request)):
                changes = [self.next_message(request, "update_display_data", deadline - time.monotonic())]
            text = str(changes.pop(0)["data"].get("text/plain", ""))
        return text

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def inspect(self, code: str, detail: int = 0) -> str:
        """The help on the last word of some code."""
        request = self.client.inspect(code, cursor_pos=len(code), detail_level=detail)
        data = self._reply(request, time.monotonic() + 15)["content"]["data"]
        return ANSI.sub("", data.get("text/plain", ""))

    def complete(self, code: str) -> list[str]:
        """Completions. The first time IPython's own completer reads modules for seconds, many under load."""
        request = self.client.complete(code)
        return list(self._reply(request, time.monotonic() + 60)["content"]["matches"])

    def _next(self, request: str, deadline: float) -> dict[str, Any]:
        while True:
            seconds = deadline - time.monotonic()
            assert seconds > 0, "the kernel is silent"
            try:
                message = self.client.get_iopub_msg(timeout=seconds)
            except queue.Empty:
                raise AssertionError("the kernel is silent") from None
            if message["parent_header"].get("msg_id") == request:
                return dict(message)
            if message["msg_type"] == "update_display_data":  # in another cell, which may be read later
                parent = message["parent_header"].get("msg_id", "")
                self._changes.setdefault(parent, []).append(message["content"])

    def _reply(self, request: str, deadline: float) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") == request:
                return dict(message)

    @staticmethod
    def _take(cell: Cell, message: dict[str, Any]) -> bool:
        kind, content = message["msg_type"], message["content"]
        cell.messages.append(message)
        if kind == "stream":
            setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
        elif kind == "execute_result":
            cell.result = content["data"]
        elif kind == "display_data":
            cell.displays.append(content["data"])
        elif kind == "update_display_data":
            cell.updates.append(content["data"])
        elif kind == "error":
            cell.error = content
        return bool(kind == "status" and content["execution_state"] == "idle")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)
            self.manager.cleanup_resources()
