"""Jobs on machines that are reached by SSH."""

from monarch_nb.job.ssh.job import LoginJob, SSHJob

__all__ = ["LoginJob", "SSHJob"]
