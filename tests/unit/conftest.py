"""Tests of units begin in a process that is part of no cluster."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown


@pytest.fixture(scope="module", autouse=True)
def part_of_no_cluster() -> Iterator[None]:
    """Leaves what an earlier module has begun, and what this one begins: which module is next is a matter of chance."""
    shutdown()
    yield
    shutdown()
