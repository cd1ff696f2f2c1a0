"""Tests of units begin in a process that is part of no cluster."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown


@pytest.fixture(scope="module", autouse=True)
def part_of_no_cluster() -> Iterator[None]:
    """Shuts down the cluster of an earlier module, and that of this one: modules run in any order."""
    shutdown()
    yield
    shutdown()
