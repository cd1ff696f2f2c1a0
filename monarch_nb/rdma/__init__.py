"""The data plane: `RDMABuffer` and what goes with it. It is not there yet; its names are, so that programs import.

`is_rdma_available()` and `is_ibverbs_available()` answer False and `get_rdma_backend()` "none": programs that ask take
their other way. What moves memory raises NotImplementedError when it is used.
"""

from typing import Any, Literal

from monarch_nb._absent import refuse

_PART = "the data plane"
_INSTEAD = "Send the tensor as an argument or a result of an endpoint: inside a host it travels as shared memory"


class RDMATcpFallbackWarning(UserWarning):
    """torchmonarch's warning that memory is moved by TCP. Never given here."""


class RDMAReadTransferWarning(UserWarning):
    """torchmonarch's warning about a slow read. Never given here."""


class RDMAWriteTransferWarning(UserWarning):
    """torchmonarch's warning about a slow write. Never given here."""


class RDMABuffer:
    """Names memory that other processes read and write. Raises NotImplementedError: not part of Monarch-NB yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("RDMABuffer", _PART, _INSTEAD)


class RDMAAction:
    """Several reads and writes in one. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("RDMAAction", _PART, _INSTEAD)


def is_rdma_available() -> bool:
    """Whether memory can be moved with `RDMABuffer`: not yet."""
    return False


def is_ibverbs_available() -> bool:
    """Whether memory can be moved by InfiniBand verbs: not yet."""
    return False


def get_rdma_backend() -> Literal["ibverbs", "tcp", "none"]:
    """How `RDMABuffer` moves memory: not at all yet."""
    return "none"


__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
