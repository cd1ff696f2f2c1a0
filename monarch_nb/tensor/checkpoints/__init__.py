"""Saves sharded tensors to the workers' disks, and restores them, also on a mesh of another shape."""

from monarch_nb.tensor.checkpoints.checkpoints import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
