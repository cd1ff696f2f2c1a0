"""Tests of real actors, supervision and meshes on simulated hosts, networks and time.

Each module has a cluster of its own in memory, `simulated`, whose controller is the test: `this_host()`, `quad`,
`own_procs` and `faults` are as in tests/cluster, so a test moves here unchanged unless a process decides what it shows.
Time passes while the test waits in `Future.get` or `await`: at once where every actor waits too, else as real time
does (for the real time-out of that `get` at most). `simulated.advance(60)` lets time pass without a wait, and
`simulated.result(future)` waits for 60 simulated seconds; they make a test one of the memory network alone.

`kill(procs)` ends the processes of a mesh or slice as SIGKILL does. Host 0 is the controller's; a module that wants
several hosts says `HOSTS = 3`, and has `simulated.hosts()`.

With MONARCH_TEST_PROCESSES=1, as in `make test-slow`, the same tests run with real processes; those that ask for
`simulated` are skipped. A test that needs signals, exit statuses, descriptors, its own interpreter or memory belongs
in tests/cluster. No test here sleeps: wait for a message instead, or advance.
"""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from monarch_nb.actor import ProcMesh
from monarch_nb.connect import shutdown
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.testing import Cluster, cluster
from tests.cluster.actor_tools import faults, own_procs, quad
from tests.cluster.fault_tools import status

__all__ = ["faults", "own_procs", "quad"]

REAL = os.environ.get("MONARCH_TEST_PROCESSES", "0") == "1"


@pytest.fixture(scope="module", autouse=True)
def controller(request: pytest.FixtureRequest) -> Iterator[Cluster | None]:
    """The cluster of a module; None if it has real processes."""
    shutdown()  # the controller of an earlier module
    if REAL:
        yield None
        shutdown()
    else:
        with cluster(hosts=getattr(request.module, "HOSTS", 1)) as simulation:
            yield simulation


@pytest.fixture
def simulated(controller: Cluster | None) -> Cluster:
    """The cluster itself, to let time pass and to break it."""
    if controller is None:
        pytest.skip("with real processes there is nothing simulated")
    return controller


@pytest.fixture
def kill(controller: Cluster | None) -> Callable[[ProcMesh], None]:
    """Ends the processes of a mesh or slice as SIGKILL does."""
    return _kill if controller is None else controller.kill


def _kill(procs: ProcMesh) -> None:
    state = state_of(procs)
    pids = {proc.address: proc.pid for proc in status().procs}
    for rank in region_of(procs).ranks():
        os.kill(pids[state.address(rank)], signal.SIGKILL)
