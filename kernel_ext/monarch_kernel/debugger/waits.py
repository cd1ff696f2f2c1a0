"""Brings the debugger into waiting cells."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_nb.debug.control import StoppedThreads
from monarch_nb.debug.prompt import NoPrompt, NothingToAsk, WaitPrompt
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render import short, table_text
from monarch_nb.debug.service import controller_of
from monarch_nb.runtime import Runtime
from monarch_nb.settings import settings
from monarch_nb.transport import throw_into

from ..display.html import framed, heading
from ..front import Bundle, Front
from ..jupyter import cell_name, takes_input

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOOK_S = 0.1  # between checks whether a waiting question is still useful
USELESS = 4  # checks in a row at which it was not: a step lets ranks go for a moment


class CellPrompt:
    """The prompt in the waiting cell, with display names of files: `Cell In[3]`."""

    def __init__(
        self,
        shell: "InteractiveShell",
        front: Front,
        runtime: Runtime,
        live: Callable[[], Bundle],
        shown_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """While `shown_elsewhere()`, another debugger shows the stopped ranks: no prompt opens."""
        controller = controller_of(runtime)
        self._front, self._view = front, PromptView(front, controller.stopped, live)
        terminal = CellTerminal(shell, front, self._view.show)
        self.waits = WaitPrompt(
            controller,
            terminal,
            lambda: front.in_cell,
            lambda file: cell_name(shell, file) or short(file),
            shown_elsewhere=shown_elsewhere,
        )

    def install(self) -> None:
        """Joins waits, which then show stopped threads."""
        self.waits.install()
        self._front.ending.append(self._view.leave_cell)

    def uninstall(self) -> None:
        """Leaves waits."""
        self.waits.uninstall()
        if self._view.leave_cell in self._front.ending:
            self._front.ending.remove(self._view.leave_cell)


class CellTerminal:
    """The only way in which a cell asks for a line: front ends have a single, unlocked channel for answers.

    Asks one question at a time, and only while a cell runs: later answers never arrive."""

    def __init__(self, shell: "InteractiveShell", front: Front, beside: Callable[[], bool] = lambda: False) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)
        self._front = front
        self._asking = threading.Lock()
        self._beside = beside
        self._has_view = False
        self._table_id = ""

    @property
    def echoes(self) -> bool:
        """True if the front end keeps typed text visible: VS Code asks in a box of its own and shows nothing of it."""
        return "__vsc_ipynb_file__" not in self._shell.user_ns

    def table(self, text: str, *, again: bool) -> bool:
        """Shows stopped threads, replacing the last such display if the front end can."""
        if again and not self._front.has_displays:
            return False
        if not again:
            self._table_id = f"monarch-{secrets.token_hex(8)}"
        self._front.display({"text/plain": text}, self._table_id, update=again)
        return True

    def beside(self) -> None:
        """Shows the live view below the table, where there are widgets."""
        self._has_view = self._beside()

    def question_withdrawn(self) -> None:
        """Prints that nothing is left to ask; the view, where there is one, does so at the question itself."""
        if not self._has_view:
            self.write("» no rank is stopped any more\n")

    @property
    def can_ask(self) -> bool:
        """True if the front end of the running cell takes questions, and the user wants any (`debug_prompt`)."""
        if not self._front.running or not settings.debug_prompt:
            return False
        return self._kernel is None or takes_input(self._kernel)

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """Returns a typed line. Raises NoPrompt, EOFError, KeyboardInterrupt on the main thread; NothingToAsk once
        `useless()` has been true for a while: an answer would change nothing. A terminal waits all the same.
        """
        if not self.can_ask:
            raise NoPrompt
        with self._asking:
            if self._kernel is None:
                return input(prompt)
            try:
                return self._read_line(prompt, useless)
            except NotImplementedError:  # StdinNotImplementedError
                raise NoPrompt from None

    def _read_line(self, prompt: str, useless: Callable[[], bool]) -> str:
        answered, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()

        def watch() -> None:
            times = 0
            while not answered.wait(LOOK_S):
                times = times + 1 if useless() else 0
                with lock:
                    if times >= USELESS and not answered.is_set() and throw_into(thread, NothingToAsk):
                        return

        threading.Thread(target=watch, name="monarch-prompt", daemon=True).start()
        try:
            return str(self._kernel.raw_input(prompt))
        finally:
            with lock:
                answered.set()

    def write(self, text: str) -> None:
        """Shows text in the cell."""
        self._front.write(text)


class PromptView:
    """The view below the text of a cell that asks, shown once in each cell.

    When nothing is stopped at the end of the cell, the last content stays in its place as static text, greyed and with
    the time.
    """

    def __init__(self, front: Front, stopped: StoppedThreads, live: Callable[[], Bundle]) -> None:
        self._front = front
        self._stopped = stopped
        self._live = live
        self._cell: object = None
        self._id = ""
        self._last: list[Stopped] = []  # the last stops shown in this cell
        self._unlisten: Callable[[], None] | None = None

    def show(self) -> bool:
        """Displays the view where the front end has widgets; returns whether it has."""
        if self._cell is self._front.parent:
            return True
        bundle = self._live()
        if bundle:
            self._cell, self._id = self._front.parent, f"monarch-{secrets.token_hex(8)}"
            self._last = self._stopped.records()
            if self._unlisten is None:
                self._unlisten = self._stopped.listen(self._on_change)
            self._front.display({**bundle, "text/plain": ""}, self._id)
        return bool(bundle)

    def leave_cell(self) -> None:
        """Leaves the last content in a cell that is at its end."""
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None
        if self._cell is not None and not self._stopped.any:
            self._front.display({"text/plain": "", "text/html": last_stops(self._last)}, self._id, update=True)
        self._cell = None

    def _on_change(self, kind: str, record: Stopped) -> None:
        if kind in ("stopped", "looked"):
            self._last = self._stopped.records()


def last_stops(records: Sequence[Stopped]) -> str:
    """Static HTML of stops that are over."""
    facts = "nothing is stopped any more", f"last shown at {time.strftime('%H:%M:%S')}"
    content = f"<pre>{escape(table_text(records))}</pre>" if records else ""
    return framed(f'<div style="opacity:.6">{heading("Debugger", *facts)}{content}</div>')
