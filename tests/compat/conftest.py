"""Programs as torchmonarch's users write them, a module per section of its API: each shares one mesh of processes."""

from pathlib import Path

import pytest

from monarch_nb.connect import shutdown
from tests.cluster.actor_tools import faults, own_procs, quad

__all__ = ["faults", "own_procs", "quad"]

FOLDER = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last of these tests shuts the controller down, since other tests count threads and files."""
    if item.path.parent == FOLDER and (nextitem is None or nextitem.path.parent != FOLDER):
        shutdown()
