"""The front end for all threads: they write into the running cell, or into the last one that has run."""

import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from monarch_nb.wire import harmless

from .jupyter import before_awaits

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Bundle = dict[str, Any]  # MIME type -> data


class Front:
    """Writes text and displays from any thread. Without a kernel (terminal IPython) they go to the terminal."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._kernel = getattr(shell, "kernel", None)
        self.parent: object = self._current_parent()  # the cell that runs, or the last one that did
        self.running = True  # the extension is loaded by a cell
        self.beginning: list[Callable[[], None]] = []  # called at the beginning of each cell, on its thread
        self.ending: list[Callable[[], None]] = []  # called at the end of each cell, on its thread

    # -- cells ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Follows which cell is running."""
        self._shell.events.register("pre_execute", self._begin)
        self._shell.events.register("post_execute", self._end)

    def uninstall(self) -> None:
        """Follows no longer."""
        self._shell.events.unregister("pre_execute", self._begin)
        self._shell.events.unregister("post_execute", self._end)

    def _begin(self) -> None:
        parent = self._current_parent()
        if not _is_cell(parent):
            return
        self.parent = parent
        self.running = True
        for call in tuple(self.beginning):
            call()

    def _end(self) -> None:
        if not _is_cell(self._current_parent()):
            return
        try:
            for call in tuple(self.ending):
                call()
        finally:
            self.running = False

    def _current_parent(self) -> object:
        if self._kernel is None:
            return {}
        return self._kernel.get_parent("shell")

    @property
    def has_displays(self) -> bool:
        """True if displays can be updated in place."""
        return self._kernel is not None

    @property
    def in_cell(self) -> bool:
        """True on the thread that is running a cell."""
        return self.running and threading.current_thread() is threading.main_thread()

    def interrupt(self) -> None:
        """Ends the cell that is running, as Ctrl-C does; from any thread. Between cells nothing happens."""
        if self.running and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @property
    def idle_handler(self) -> object:
        """The handler of SIGINT between cells; None where the kernel does not set one. Set on the main thread only.

        ipykernel has the default handler while it handles a message, and puts this one back afterwards.
        """
        return getattr(self._kernel, "saved_sigint_handler", None)

    @idle_handler.setter
    def idle_handler(self, handler: object) -> None:
        assert self._kernel is not None
        self._kernel.saved_sigint_handler = handler

    def before_awaits(self, call: Callable[[], None]) -> Callable[[], None]:
        """Calls `call` before a cell that awaits; the result undoes this."""
        return before_awaits(self._kernel, call)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedules a call on the main thread, between two messages of the kernel; from any thread."""
        assert self._kernel is not None
        self._kernel.io_loop.add_callback(call)

    @property
    def numbered(self) -> bool:
        """True for a cell of the notebook: front ends also run code of their own, unseen."""
        content = self.parent.get("content", {}) if isinstance(self.parent, dict) else {}
        return not content.get("silent") and bool(content.get("store_history", True))

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, text: str, name: str = "stdout", cell: object = None) -> None:
        """Writes text as output of the cell, in one message; or of an earlier `cell`, as `parent` was then."""
        stream, text = getattr(sys, name), harmless(text)
        if cell is not None and cell is not self.parent and self._kernel is not None:
            self._send("stream", {"name": name, "text": text}, f"stream.{name}", cell)
            return
        if self._kernel is None or not hasattr(stream, "pub_thread"):  # a terminal, or %%capture
            stream.write(text)
            stream.flush()
            return
        stream.flush()  # earlier output of the cell comes first
        self._send("stream", {"name": name, "text": text}, f"stream.{name}")

    def display(
        self,
        bundle: Bundle,
        display_id: str | None = None,
        *,
        update: bool = False,
        cell: Any = None,
        metadata: Bundle | None = None,
    ) -> None:
        """Shows something in the cell (or an earlier one), or shows it in place of what was shown under that id."""
        bundle = {kind: harmless(data) if kind == "text/plain" else data for kind, data in bundle.items()}
        if self._kernel is None:
            if not update:
                self.write(f"{bundle['text/plain']}\n", "stderr")
            return
        sys.stdout.flush()
        sys.stderr.flush()
        transient = {} if display_id is None else {"display_id": display_id}
        kind = "update_display_data" if update else "display_data"
        content = {"data": bundle, "metadata": metadata or {}, "transient": transient}
        if not hasattr(sys.stdout, "pub_thread") and (cell is None or cell is self.parent):  # %%capture
            self._shell.display_pub.publish(**content, update=update)
            return
        self._send(kind, content, "display_data", cell)

    def _send(self, kind: str, content: Mapping[str, Any], topic: str, cell: Any = None) -> None:
        kernel = self._kernel
        assert kernel is not None
        # Not through display_pub, where the cell depends on the thread and is stored differently in each version.
        kernel.session.send(kernel.iopub_socket, kind, dict(content), parent=cell or self.parent, ident=topic.encode())


def _is_cell(parent: object) -> bool:
    """Returns whether a cell runs: messages of widgets fire the same events, also during a cell."""
    kind = parent.get("header", {}).get("msg_type", "execute_request") if isinstance(parent, dict) else ""
    return bool(kind == "execute_request")


class TransientLines:
    """A few lines of text, or some HTML, in a cell; they are replaced in place and leave nothing behind."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._id = ""
        self._shown = ""

    def show(self, text: str, html: str = "") -> None:
        """Replaces the content by text, or by HTML if there is any; sends nothing if it is unchanged."""
        if text + html == self._shown:
            return
        fresh = not self._id
        if fresh:
            self._id = f"monarch-{secrets.token_hex(8)}"
        self._shown = text + html
        bundle = {"text/plain": text, "text/html": html} if html else {"text/plain": text}
        self._front.display(bundle, self._id, update=not fresh)

    def clear(self) -> None:
        """Clears the display."""
        if self._id:
            self._front.display({"text/plain": "", "text/html": ""}, self._id, update=True)
            self._id = self._shown = ""
