"""Programs as torchmonarch's users write them, a module per section of its API: each shares one mesh of processes."""

from pathlib import Path

import pytest

from monarch_nb.connect import shutdown
from tests.cluster.actor_tools import faults, own_procs, quad

__all__ = ["faults", "own_procs", "quad"]

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last of these tests takes the controller down, for others count threads and files."""
    if item.path.parent == HERE and (nextitem is None or nextitem.path.parent != HERE):
        shutdown()
