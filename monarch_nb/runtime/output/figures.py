"""The backend of matplotlib in the processes of a mesh: `plt.show()` displays the open figures and closes them.

Loaded by matplotlib alone, so that processes without figures do not load matplotlib.
"""

from collections.abc import Iterable

from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from monarch_nb.runtime.output.displays import display

__all__ = ["FigureCanvas", "close", "numbers", "show", "show_each"]


def show(*_: object, **__: object) -> None:
    """Displays all open figures, in the order of their numbers. Blocks while they are drawn."""
    show_each(numbers())


def numbers() -> list[int]:
    """Returns the numbers of the figures that are open."""
    return sorted(Gcf.figs)


def show_each(figure_numbers: Iterable[int], but: object = None) -> None:
    """Displays some figures and closes them; the figure `but` is closed only."""
    managers = [Gcf.figs[number] for number in figure_numbers if number in Gcf.figs]
    try:
        for manager in managers:
            figure = manager.canvas.figure
            if figure is not but and figure.get_axes():
                display(figure)
    finally:
        for manager in managers:
            Gcf.destroy(manager)


def close(figure: object) -> None:
    """Closes a figure, if it is open."""
    for manager in [manager for manager in Gcf.figs.values() if manager.canvas.figure is figure]:
        Gcf.destroy(manager)
