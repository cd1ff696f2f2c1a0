"""Brings the debugger into waiting cells."""

import secrets
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from monarch_nb.debug.control import StoppedThreads
from monarch_nb.debug.prompt import WaitPrompt
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render import short, table_text
from monarch_nb.debug.service import controller_of
from monarch_nb.runtime import Runtime

from ..display.html import framed, heading
from ..files import cell_name
from ..front import Bundle, Front
from .terminal import CellTerminal

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class CellPrompt:
    """The prompt in the waiting cell, with display names of files: `Cell In[3]`."""

    def __init__(
        self,
        shell: "InteractiveShell",
        front: Front,
        runtime: Runtime,
        live: Callable[[], Bundle],
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """While `elsewhere()`, people look at what is stopped in another debugger: nothing is asked."""
        controller = controller_of(runtime)
        self._front, self._view = front, PromptView(front, controller.stopped, live)
        terminal = CellTerminal(shell, front, self._view.show)
        self.waits = WaitPrompt(
            controller,
            terminal,
            lambda: front.in_cell,
            lambda file: cell_name(shell, file) or short(file),
            elsewhere=elsewhere,
        )

    def install(self) -> None:
        """Joins waits, which then show what is stopped."""
        self.waits.install()
        self._front.ending.append(self._view.ended)

    def uninstall(self) -> None:
        """Leaves waits."""
        self.waits.uninstall()
        if self._view.ended in self._front.ending:
            self._front.ending.remove(self._view.ended)


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

    def ended(self) -> None:
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
