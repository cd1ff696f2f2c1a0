"""Exceptions for operations on sharded tensors that are refused when they are issued."""

from monarch_nb._about import more

__all__ = ["DataDependentShapeError", "NoRuleError", "PropagationError", "ViewWriteError"]

_MORE = more("manual/tensors.md#what-goes-wrong")


class PropagationError(RuntimeError):
    """An operation on sharded tensors was refused. The text names the operation, the line, why, and what to write."""

    def __init__(self, operation: str, reason: str, instead: str = "", line: str = "") -> None:
        self.operation, self.reason, self.instead, self.line = operation, reason, instead, line
        at = f" (at {line})" if line else ""
        super().__init__(f"{operation}{at}: {reason}" + (f". {instead}" if instead else "") + _MORE)


class DataDependentShapeError(PropagationError):
    """The shape of the result depends on the values of a tensor, which the controller does not have."""


class NoRuleError(PropagationError):
    """The operation has no sharding rule, and settings forbid to gather its inputs."""


class ViewWriteError(PropagationError):
    """A write through a view that is a copy, because the dimension it cuts is sharded: it would be lost."""
