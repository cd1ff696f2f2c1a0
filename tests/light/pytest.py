"""The part of pytest that a process needs to read actors from a module of tests: marks and fixtures, left off.

All else is taken from pytest itself on first use. To import it costs a process six times as much as its start,
and tests start many hundreds.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


class LeftOff:
    """A mark or fixture. In the end it returns the function that it decorates."""

    def __getattr__(self, name: str) -> "LeftOff":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class Named:
    """A class, most of which stand in annotations only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_itself(), self._name), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_itself(), self._name)(*args, **kwargs)

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
    folder = str(Path(__file__).parent)
    path = sys.path[:]
    sys.path[:] = [entry for entry in path if entry != folder]
    if sys.modules["pytest"].__file__ == __file__:
        del sys.modules["pytest"]
    try:
        return importlib.import_module("pytest")
    finally:
        sys.path[:] = path
