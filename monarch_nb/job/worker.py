"""One host of a job: a process that keeps a host agent at an address."""

from collections.abc import Sequence
from pathlib import Path

from monarch_nb.connect import run_worker_until_killed


def main(argv: Sequence[str]) -> int:
    """Be a worker at the given address, with the job's key file behind it, until the host is shut down, or killed."""
    run_worker_until_killed(argv[0], Path(argv[1]) if len(argv) > 1 else None)
    return 0
