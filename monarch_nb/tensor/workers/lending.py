"""Tensors under names of the program's, in the namespace in which a process runs cells."""

import sys
from typing import Any

_NOTHING = object()
_before: dict[str, tuple[Any, Any]] = {}  # what a name meant, and the tensor that it means while it is lent


def lend(tensors: dict[str, Any]) -> None:
    """Cells have this process's parts of the tensors, under these names."""
    names = vars(sys.modules["__main__"])
    for name, part in tensors.items():
        _before[name] = (names.get(name, _NOTHING), part)
        names[name] = part


def take_back(lent: list[str]) -> None:
    """They mean again what they meant before, but for what a cell has given another value."""
    names = vars(sys.modules["__main__"])
    for name in lent:
        before, part = _before.pop(name, (_NOTHING, _NOTHING))
        if names.get(name, _NOTHING) is not part:
            continue
        if before is _NOTHING:
            names.pop(name, None)
        else:
            names[name] = before
