"""Saving what sharded tensors hold on the workers' disks, and restoring it, on a mesh of another shape too."""

from monarch_nb.tensor.checkpoints.checkpoints import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
