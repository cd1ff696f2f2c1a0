"""Finds the line of the user's program that issues an operation."""

import os
import sys
from types import FrameType

import torch

from monarch_nb.code.file_names import name_of

__all__ = ["user_line"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, __file__.rpartition(os.sep + "tensor" + os.sep)[0] + os.sep)


def user_line() -> str:
    """`file:line` of the innermost frame that is neither PyTorch's nor ours; empty where there is none.

    In a backward pass that is the line that called `backward()`, if autograd runs on the calling thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and not name.startswith("<frozen"):
            return f"{name_of(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
