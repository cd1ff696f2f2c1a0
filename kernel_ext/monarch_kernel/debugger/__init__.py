"""The debugger in the cell: the prompt of a call that waits, and the magics."""

from .magics import DebugMagics, with_remote
from .waits import CellPrompt

__all__ = ["CellPrompt", "DebugMagics", "with_remote"]
