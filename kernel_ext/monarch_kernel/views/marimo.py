"""Displays where there is no IPython, as in marimo: `show(mesh)` as the last line of a cell, live in marimo's pages."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from html import escape
from types import SimpleNamespace
from typing import Any

from monarch_nb.runtime import started

from ..display.profile import PROFILE, profile_html
from ..display.timeline import TIMELINE, timeline_html
from ..session import Session
from . import VIEWS, Views
from .widgets import Widgets

logger = logging.getLogger(__name__)
Forms = Mapping["type | str", Callable[[Any], str]]


class LiveValue:
    """A value as it looks now, for front ends that ask an object for its HTML; live in a page of marimo."""

    def __init__(self, html: str, element: Callable[[], Any] = lambda: None) -> None:
        self._html = html
        self._element = element

    def _repr_html_(self) -> str:
        return self._html

    def _mime_(self) -> tuple[str, str]:
        element = self._element()
        if element is None:
            return "text/html", self._html
        kind, text = element._mime_()
        return kind, text


def live_value(value: Any, forms: Forms) -> LiveValue:
    """A mesh, value mesh, future, failure, profile and the like: as a table or picture, or where marimo has a page and
    there is a live view of such values, live; others as text.
    """
    named: Forms = {
        **forms,
        PROFILE: lambda profile: profile_html(profile, os.path.basename),
        TIMELINE: lambda timeline: timeline_html(timeline, os.path.basename),
    }
    for kind in type(value).__mro__:
        form = named.get(kind) or named.get(f"{kind.__module__}.{kind.__qualname__}")
        if form is not None:
            return LiveValue(form(value), lambda: element_of(value))
    return LiveValue(f"<pre>{escape(repr(value))}</pre>")


class Pages:
    """The widgets of a process in which marimo runs cells; marimo's own comms carry them."""

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
