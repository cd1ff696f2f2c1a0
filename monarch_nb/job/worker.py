"""One host of a ProcessJob: a process that keeps a host agent at an address."""

from collections.abc import Sequence

from monarch_nb.mesh import run_worker_loop_forever


def main(argv: Sequence[str]) -> int:
    """Be a worker at the given address until the host is shut down."""
    run_worker_loop_forever(address=argv[0], ca="trust_all_connections")
    return 0
