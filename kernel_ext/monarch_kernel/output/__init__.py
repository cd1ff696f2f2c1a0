"""Output of ranks in the cells that caused it: finding the cell, limits, merging of equal lines, folding."""

from .cell_output import CellOutput, Cells

__all__ = ["CellOutput", "Cells"]
