"""Exceptions for operations on sharded tensors that are refused on issue, and the user's line."""

import os
import sys
from types import FrameType

import torch

from monarch_nb._package import more
from monarch_nb.code.file_names import name_of

_MORE = more("manual/tensors.md#what-goes-wrong")


class PropagationError(RuntimeError):
    """An operation on sharded tensors was refused. The text has the operation, the line, the reason and a remedy."""

    def __init__(self, operation: str, reason: str, instead: str = "", line: str = "") -> None:
        self.operation, self.reason, self.instead, self.line = operation, reason, instead, line
        location = f" (at {line})" if line else ""
        super().__init__(f"{operation}{location}: {reason}" + (f". {instead}" if instead else "") + _MORE)


class DataDependentShapeError(PropagationError):
    """The shape of the result depends on the values of a tensor, which the controller does not have."""


class NoRuleError(PropagationError):
    """The operation has no sharding rule, and settings forbid gathering its inputs."""


class ViewWriteError(PropagationError):
    """A write through a view that is a copy, because it cuts a sharded dimension: the write would be lost."""


_INSIDE = (os.path.dirname(torch.__file__) + os.sep, __file__.rpartition(os.sep + "tensor" + os.sep)[0] + os.sep)


def user_line() -> str:
    """Returns `file:line` of the innermost frame that is neither PyTorch's nor ours; empty if there is none.

    In a backward pass this is the line that called `backward()`, if autograd runs on the calling thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and not name.startswith("<frozen"):
            return f"{name_of(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
