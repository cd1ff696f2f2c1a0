"""Brings the debugger into waiting cells."""

import secrets
from collections.abc import Callable
from typing import Any

from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.prompt.conversation import Waiting
from monarch_nb.debug.prompt.waits import Attending
from monarch_nb.debug.render.groups import short
from monarch_nb.runtime import Runtime
from monarch_nb.runtime.features import feature

from ..files import cell_name
from ..front import Bundle, Front
from .broker import Broker


class Prompting(Attending):
    """Asks in the cell that waits, and calls files what people call them: `Cell In[3]`."""

    def __init__(self, shell: Any, front: Front, engine: Runtime, live: Callable[[], Bundle]) -> None:
        self.controller: Controller = feature(engine, "debug").controller
        beside = Beside(front, self.controller, live)
        self._front, self._ended = front, beside.ended
        asks = Broker(shell, front, beside.show)
        self.asks = Waiting(self.controller, asks, lambda file: cell_name(shell, file) or short(file))
        super().__init__(self.asks, lambda: front.in_cell)

    def install(self) -> None:
        """From now on waits show what is stopped."""
        super().install()
        self._front.ending.append(self._ended)

    def uninstall(self) -> None:
        """Not any more."""
        super().uninstall()
        if self._ended in self._front.ending:
            self._front.ending.remove(self._ended)


class Beside:
    """The live view below the text of a cell that asks, once in each; it goes when nothing is stopped at its end."""

    def __init__(self, front: Front, controller: Controller, live: Callable[[], Bundle]) -> None:
        self._front = front
        self._controller = controller
        self._live = live
        self._cell: Any = None
        self._id = ""

    def show(self) -> bool:
        """Shows it, where there are widgets; whether there are."""
        if self._cell is self._front.parent:
            return True
        bundle = self._live()
        if bundle:
            self._cell, self._id = self._front.parent, f"monarch-{secrets.token_hex(8)}"
            self._front.display({**bundle, "text/plain": ""}, self._id)
        return bool(bundle)

    def ended(self) -> None:
        """The cell is at its end."""
        if self._cell is not None and not self._controller.book.any:
            self._front.display({"text/plain": "", "text/html": ""}, self._id, update=True)
        self._cell = None
