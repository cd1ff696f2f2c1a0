"""Live views in marimo's pages, where there is neither IPython nor a kernel of Jupyter's: its own comms carry them."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

from monarch_nb.runtime import started

from ..session import Session
from . import Views
from .registry import VIEWS
from .widgets import Widgets

logger = logging.getLogger(__name__)


class Pages:
    """The widgets of a process in which marimo runs cells."""

    def __init__(self) -> None:
        shell: Any = SimpleNamespace(user_ns={}, compile=SimpleNamespace(format_code_name=lambda file: None))
        # Messages of a page wait for the running cell; marimo does not say whether one runs.
        self._views = Views(shell, Session(shell), lambda: True)
        self._widgets = Widgets(shell, self._views)
        self._runtime: Any = None

    def element(self, value: object) -> object:
        """Returns an element of marimo's that shows a value live; None where no view shows such values."""
        runtime = started()
        if runtime is None:
            return None
        if runtime is not self._runtime:
            self._runtime = runtime
            self._views.attach(runtime)
        widget = self._widgets.of(value, VIEWS)
        return None if widget is None else sys.modules["marimo"].ui.anywidget(widget)


_pages: Pages | None = None


def element_of(value: object) -> object:
    """Returns the element of a value in a marimo page; None elsewhere, as in a marimo program run as a script."""
    global _pages
    marimo = sys.modules.get("marimo")
    if marimo is None or marimo.app_meta().mode not in ("edit", "run"):
        return None
    try:
        _pages = _pages or Pages()
        return _pages.element(value)
    except Exception:
        logger.debug("no live display", exc_info=True)
        return None
