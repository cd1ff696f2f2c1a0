"""The front ends of the widgets: one module and one style sheet for each view, bundled from `labextension`."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypedDict

STATIC = Path(__file__).parents[1] / "static"
VIEWS = (
    "debug",
    "failures",
    "history",
    "logs",
    "mesh",
    "metrics",
    "panel",
    "profiles",
    "tensors",
    "timeline",
    "transfers",
)
LARGEST = 82_000  # bytes of one view: it travels through the kernel with each widget
LARGEST_PANEL = 240_000  # of the panel, which has most of the others in it, and is shown once


class Bundle(TypedDict):
    """The front end of a view: functions that return its module and its style sheet."""

    script: Callable[[], str]
    style: Callable[[], str]


def built() -> bool:
    """Returns whether the bundles are there; only a checkout from which they were removed has none."""
    return all((STATIC / f"{view}.{kind}").is_file() for view in VIEWS for kind in ("js", "css"))


def bundled(view: str) -> Bundle:
    """Returns the front end that is bundled for a view; it is read when it is first used."""
    return {"script": partial(script, view), "style": partial(style, view)}


@cache
def script(view: str) -> str:
    """Returns the ES module of a view; it fetches nothing when it runs."""
    return (STATIC / f"{view}.js").read_text(encoding="utf-8")


@cache
def style(view: str) -> str:
    """Its style sheet."""
    return (STATIC / f"{view}.css").read_text(encoding="utf-8")
