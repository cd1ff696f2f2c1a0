"""Each test makes its own cluster, with its own time and failures."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown
from monarch_nb.testing import Cluster, cluster
from tests.memory_network.conftest import REAL


@pytest.fixture(scope="module", autouse=True)
def controller() -> None:
    if REAL:
        pytest.skip("with real processes there is nothing simulated")
    shutdown()


@pytest.fixture
def three() -> Iterator[Cluster]:
    """Three hosts, the controller on the first."""
    with cluster(hosts=3) as sim:
        yield sim


@pytest.fixture
def two() -> Iterator[Cluster]:
    """Two hosts, the controller on the first."""
    with cluster(hosts=2) as sim:
        yield sim
