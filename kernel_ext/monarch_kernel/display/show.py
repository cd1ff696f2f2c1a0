"""Displays without IPython, as marimo's cells take them: `show(mesh)` as the last line of a cell."""

import os
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from .profile import PROFILE, profile_html

Forms = Mapping["type | str", Callable[[Any], str]]


class Shown:
    """A value as it looks now, for front ends that ask an object for its HTML."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html

    def _mime_(self) -> tuple[str, str]:
        return "text/html", self._html


def shown(value: Any, forms: Forms) -> Shown:
    """A mesh, value mesh, future, failure, profile and the like as a static table or picture; others as text."""
    named: Forms = {**forms, PROFILE: lambda profile: profile_html(profile, os.path.basename)}
    for kind in type(value).__mro__:
        form = named.get(kind) or named.get(f"{kind.__module__}.{kind.__qualname__}")
        if form is not None:
            return Shown(form(value))
    return Shown(f"<pre>{escape(repr(value))}</pre>")
