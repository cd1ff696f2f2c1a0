"""One host of a ProcessJob: a process that keeps a host agent at an address."""

from collections.abc import Sequence

from monarch_nb.attach import run_worker_until_killed


def main(argv: Sequence[str]) -> int:
    """Be a worker at the given address until the host is shut down, or killed."""
    run_worker_until_killed(argv[0])
    return 0
