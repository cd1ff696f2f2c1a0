"""What a process needs of pytest that reads a module of tests for the actors in it: its marks and fixtures, left off.

All else is taken from pytest itself once it is asked for. To import it costs a process six times what its start does,
and tests start many hundreds.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


class LeftOff:
    """A mark or fixture. Whatever is made of it, it gives back the function that it decorates in the end."""

    def __getattr__(self, name: str) -> "LeftOff":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self


class Named:
    """A class, most of which stand in annotations only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_itself(), self._name), name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return getattr(_itself(), self._name)(*given, **named)

    def __getitem__(self, parameters: Any) -> "Named":
        return self

    def __or__(self, other: Any) -> "Named":
        return self

    __ror__ = __or__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("mark", "fixture", "param", "hookimpl"):
        return LeftOff()
    return Named(name) if name[0].isupper() else getattr(_itself(), name)


def _itself() -> Any:
    """The one that is installed, from now on under its name."""
    here = str(Path(__file__).parent)
    path = sys.path[:]
    sys.path[:] = [one for one in path if one != here]
    if sys.modules["pytest"].__file__ == __file__:
        del sys.modules["pytest"]
    try:
        return importlib.import_module("pytest")
    finally:
        sys.path[:] = path
