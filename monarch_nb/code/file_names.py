"""Display names of source files: a notebook has names for its cells."""

from collections.abc import Callable
from pathlib import PurePath

Namer = Callable[[str], str]

namers: list[Namer] = []  # each returns "" for a file without a name; a notebook adds its own


def name_of(file: str) -> str:
    """Returns `Cell In[3]` for a cell of a notebook; for any other file its own name."""
    return next((name for namer in namers if (name := namer(file))), file)


def line_name(source: str) -> str:
    """Returns `train.py:41` for a line `/home/train.py:41`, and `Cell In[3]:7` in a cell of a notebook."""
    file, _, line = source.rpartition(":")
    return f"{PurePath(name_of(file)).name}:{line}"
