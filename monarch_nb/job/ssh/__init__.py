"""Jobs on machines that one can log in to by SSH."""

from monarch_nb.job.ssh.job import LoginJob, SSHJob

__all__ = ["LoginJob", "SSHJob"]
