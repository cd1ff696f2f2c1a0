"""Warnings about how memory is moved, by the names that torchmonarch gives them."""

__all__ = ["RDMAReadTransferWarning", "RDMATcpFallbackWarning", "RDMAWriteTransferWarning"]


class RDMATcpFallbackWarning(UserWarning):
    """Memory is moved through sockets, as there is no faster way to its process. Given once per process."""


class RDMAReadTransferWarning(UserWarning):
    """torchmonarch's warning about a slow read. Not given here: `monarch.rdma.routes()` shows the way bytes take."""


class RDMAWriteTransferWarning(UserWarning):
    """torchmonarch's warning about a slow write. Not given here: `monarch.rdma.routes()` shows the way bytes take."""
