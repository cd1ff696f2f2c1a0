"""What ranks write and display, in the cells that caused it: which cell, how much of it, equal lines once, folds."""

from .cell_output import CellOutput
from .cells import Cells

__all__ = ["CellOutput", "Cells"]
