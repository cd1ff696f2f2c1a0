"""Jobs on clouds and Kubernetes, by SkyPilot."""

from monarch_nb.job.skypilot.job import SkyPilotJob

__all__ = ["SkyPilotJob"]
