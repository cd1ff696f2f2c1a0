"""Jobs on machines of a Lightning teamspace."""

from monarch_nb.job.lightning.job import LightningJob

__all__ = ["LightningJob"]
