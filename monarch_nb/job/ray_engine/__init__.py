"""Jobs on the nodes of a Ray cluster."""

from monarch_nb.job.ray_engine.job import RayJob

__all__ = ["RayJob"]
