"""The notebook side of Monarch: `%load_ext monarch`, or `%load_ext monarch_nb`."""

from typing import TYPE_CHECKING

from .display import panel, show
from .extension import Extension

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "panel", "show", "unload_ipython_extension"]

_loaded: dict[int, Extension] = {}


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Makes this kernel the controller: magics, displays, output of the ranks, failures in the cell."""
    if id(shell) in _loaded:  # already, under its other name
        return
    extension = Extension(shell)
    extension.load()
    _loaded[id(shell)] = extension


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Removes the extension; meshes stay."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.unload()
