"""The debugger in the cell: the prompt of a call that waits, and the magics."""

from .prompting import Prompting

__all__ = ["Prompting"]
