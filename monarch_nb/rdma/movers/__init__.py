"""The ways of moving bytes from the memory of one process into that of another, one file each."""

from monarch_nb.rdma.movers.mover import CannotReachError, Move, Mover, is_of_host, is_to_host

__all__ = ["CannotReachError", "Move", "Mover", "is_of_host", "is_to_host"]
