"""The front ends of the widgets: one module and one style sheet for each view, bundled from `labextension`."""

from functools import cache
from pathlib import Path

STATIC = Path(__file__).parents[1] / "static"
VIEWS = ("debug", "failures", "logs", "mesh", "metrics")
LARGEST = 80_000  # bytes of one view: it travels through the kernel with each widget


def built() -> bool:
    """Whether the bundles are there; only a checkout in which somebody removed them has none."""
    return all((STATIC / f"{view}.{kind}").is_file() for view in VIEWS for kind in ("js", "css"))


@cache
def script(view: str) -> str:
    """The ES module of a view; it fetches nothing when it runs."""
    return (STATIC / f"{view}.js").read_text(encoding="utf-8")


@cache
def style(view: str) -> str:
    """Its style sheet."""
    return (STATIC / f"{view}.css").read_text(encoding="utf-8")
