"""The debugger in the cell: the prompt of a call that waits, and the magics."""

from .magics import DebugMagics, with_remote
from .prompting import Prompting

__all__ = ["DebugMagics", "Prompting", "with_remote"]
