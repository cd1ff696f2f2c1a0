"""Brings the debugger into waiting cells."""

from typing import Any

from monarch_nb.debug.attending import Attending
from monarch_nb.debug.controller import Controller
from monarch_nb.debug.groups import short
from monarch_nb.debug.prompt import Waiting
from monarch_nb.runtime import Runtime
from monarch_nb.runtime.features import feature

from ..files import cell_name
from ..front import Front
from .broker import Broker


class Prompting(Attending):
    """Asks in the cell that waits, and calls files what people call them: `Cell In[3]`."""

    def __init__(self, shell: Any, front: Front, engine: Runtime) -> None:
        self.controller: Controller = feature(engine, "debug").controller
        self.asks = Waiting(self.controller, Broker(shell, front), lambda file: cell_name(shell, file) or short(file))
        super().__init__(self.asks, lambda: front.in_cell)
