"""Displays without IPython, as marimo's cells take them: `show(mesh)` as the last line of a cell."""

import os
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from ..views.marimo import element_of
from .profile import PROFILE, profile_html
from .timeline import TIMELINE, timeline_html

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
