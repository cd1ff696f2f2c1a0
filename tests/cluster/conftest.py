"""Fixtures for tests with real processes; those of faults leave nothing behind, and are checked for it."""

from tests.cluster.actor_tools import faults, own_procs, pytest_runtest_teardown, quad
from tests.cluster.cables import cable
from tests.cluster.fault_tools import duo, host, impatient, shown, workers
from tests.cluster.leftovers import nothing_left_behind, nothing_left_by_module, own_place
from tests.cluster.tensor_tools import born_for_tensors

__all__ = [
    "born_for_tensors",
    "cable",
    "duo",
    "faults",
    "host",
    "impatient",
    "nothing_left_behind",
    "nothing_left_by_module",
    "own_place",
    "own_procs",
    "pytest_runtest_teardown",
    "quad",
    "shown",
    "workers",
]
