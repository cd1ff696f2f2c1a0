"""Makes `display` available in the processes of a mesh as in a notebook, also for libraries that display.

Nothing is imported for it: modules are changed once the user's code has imported them. The environment is not
changed, as child processes inherit it: those may run another Python.
"""

import builtins
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from monarch_nb._imported import when_imported
from monarch_nb.runtime.output import displays
from monarch_nb.wire import error_line

BACKEND = "module://monarch_nb.runtime.output.figures"
# Set by a kernel for itself: not chosen by the user, and useless in another process.
_OF_KERNELS = ("", "module://matplotlib_inline.backend_inline", "module://ipykernel.pylab.backend_inline")
_REPLACED = ("display", "update_display", "publish_display_data", "clear_output")


def install() -> None:
    """Installs the hooks."""
    vars(builtins)["display"] = displays.display
    changes: dict[str, Callable[[ModuleType], None]] = {
        "IPython.core.display": _display_here,  # where IPython 7 has them
        "IPython.core.display_functions": _display_here,
        "IPython.display": _display_here,
        "tqdm.notebook": _bars_as_text,
    }
    if os.environ.get("MPLBACKEND", "") in _OF_KERNELS:
        os.environ.pop("MPLBACKEND", None)
        changes["matplotlib"] = _draw_here
    if "PLOTLY_RENDERER" not in os.environ:
        changes["plotly.io._renderers"] = _draw_as_data
    for name, change in changes.items():
        when_imported(name, partial(_change, name, change))


def _change(name: str, change: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        change(module)
    except Exception as error:  # another version of the library
        sys.stderr.write(f"{name} does not display in notebooks from here: {error_line(error)}\n")


def open_figures() -> list[int]:
    """Returns the numbers of the open figures of pyplot that `plt.show()` would display."""
    figures = sys.modules.get("monarch_nb.runtime.output.figures")
    return list(figures.numbers()) if figures is not None else []


def show_figures(before: Sequence[int], value: object = None) -> None:
    """Displays and closes the figures that a cell has opened; a figure that is the cell's value is closed only."""
    figures = sys.modules.get("monarch_nb.runtime.output.figures")
    if figures is not None and _backend() == BACKEND:
        figures.show_each([number for number in figures.numbers() if number not in before], value)


def _backend() -> str:
    matplotlib = sys.modules.get("matplotlib")
    return str(dict.__getitem__(matplotlib.rcParams, "backend")) if matplotlib is not None else ""


def _draw_here(matplotlib: ModuleType) -> None:
    matplotlib.rcParams["backend"] = BACKEND


def _draw_as_data(module: ModuleType) -> None:
    """Makes Plotly display as in a kernel; outside of one it opens a browser."""
    module.renderers.default = "plotly_mimetype+notebook_connected"


def _display_here(module: ModuleType) -> None:
    for name in _REPLACED:
        if hasattr(module, name):
            setattr(module, name, getattr(displays, name))


def _bars_as_text(module: ModuleType) -> None:
    """Replaces progress bars of widgets, which need a kernel, by lines that overwrite themselves."""
    plain = sys.modules.get("tqdm.std")
    if plain is None:
        return
    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, plain.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, plain.trange)
