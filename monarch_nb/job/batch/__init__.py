"""Jobs of schedulers whose hosts share a folder: Slurm, MPI."""

from monarch_nb.job.batch.mpi_job import MPIJob
from monarch_nb.job.batch.slurm_job import SlurmJob

__all__ = ["MPIJob", "SlurmJob"]
