"""The notebook side of Monarch: `%load_ext monarch`, or `%load_ext monarch_nb`."""

from .display import show
from .extension import Extension

__all__ = ["load_ipython_extension", "show", "unload_ipython_extension"]

_loaded: dict[int, Extension] = {}


def load_ipython_extension(shell: object) -> None:
    """Makes this kernel the controller: magics, displays, output of the ranks, failures in the cell."""
    if id(shell) in _loaded:  # under its other name already
        return
    extension = Extension(shell)
    extension.load()
    _loaded[id(shell)] = extension


def unload_ipython_extension(shell: object) -> None:
    """Removes the extension; meshes stay."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.unload()
