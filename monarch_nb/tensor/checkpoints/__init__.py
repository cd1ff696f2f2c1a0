"""Files of sharded tensors on the workers' disks, restored also on a mesh of another shape."""

from monarch_nb.tensor.checkpoints.checkpoints import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
