"""For all tests: how much they try, and how the processes they start are set up, hundreds of them."""

import os
import sys

import pytest
from hypothesis import settings

from tests.effort import THOROUGH, tries

# Born without torch and numpy, which cost each host agent a second; tests that want them say so.
os.environ.setdefault("MONARCH_NB_PRELOAD", "")
# Compiled once, not in each process; the tests themselves too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile(
    "ours", max_examples=tries(100), deadline=None, derandomize=not THOROUGH, print_blob=True, database=None
)
settings.load_profile("ours")

# Modules that take longest come first, so that `make test` does not wait for one of them at the end.
LONG = ("test_quickstart_lab", "test_quickstart", "test_hosts_links", "test_host_start", "test_hosts_cast",
        "test_worker_loop", "test_faults_controller", "test_faults_agent", "test_faults_interrupts", "test_host_owner",
        "test_faults_limits", "test_host_exits", "test_host_cast", "test_spmd", "test_actor_main")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first; else the order stays."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
