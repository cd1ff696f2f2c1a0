"""For all tests: how much they try, and how the processes they start are set up, hundreds of them."""

import os
import signal
import sys
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.effort import THOROUGH, tries

# Born without torch and numpy, which cost each host agent a second; tests that want them say so.
os.environ.setdefault("MONARCH_NB_PRELOAD", "")
# Compiled once, not in each process; the tests themselves too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ours", max_examples=tries(100), deadline=None, derandomize=not THOROUGH, print_blob=True, database=None
)
settings.load_profile("ours")

# Modules that take longest come first, so that `make test` does not wait for one of them at the end.
LONG = ("test_quickstart", "test_debug_notebook", "test_hosts_links", "test_host_start", "test_hosts_cast",
        "test_worker_loop", "test_faults_controller", "test_faults_agent", "test_faults_interrupts", "test_host_owner",
        "test_faults_limits", "test_host_exits", "test_host_cast", "test_spmd", "test_actor_main")  # fmt: skip


class FilesTogether(LoadFileScheduling):  # type: ignore[misc]
    """A module at a time; those with a browser share it, and so come one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "tests/browser" if file.startswith("tests/browser/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a browser first, then long modules; else the order stays."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        stem = item.path.stem
        return item.path.parent.name != "browser", LONG.index(stem) if stem in LONG else len(LONG)

    items.sort(key=place)
