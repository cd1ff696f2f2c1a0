"""For all tests: how much they try, and how the processes they start are set up, hundreds of them."""

import gc
import os
import signal
import sys
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.effort import EFFORT, tries

# Born without torch and numpy, which cost each host agent a second; tests that want them say so.
os.environ.setdefault("MONARCH_NB_PRELOAD", "")
# Compiled once, not in each process; the tests themselves too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ours", max_examples=tries(60), deadline=None, derandomize=EFFORT == 1, print_blob=True, database=None
)
settings.load_profile("ours")


def pytest_collection_finish() -> None:
    """Tests and their modules are there to stay: collections, which tests ask for, need not look at them."""
    gc.collect()
    gc.freeze()


FIRST = ("browser", "soak")  # folders that take a minute and more
LAST = ("memory_network", "unit")  # no test of theirs takes long


class FilesTogether(LoadFileScheduling):  # type: ignore[misc]
    """A module at a time; those with a browser share it, and so come one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "tests/browser" if file.startswith("tests/browser/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that nobody waits for it at the end; what starts no process comes last."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        if folder in FIRST:
            return FIRST.index(folder)
        return len(FIRST) + (0 if item.get_closest_marker("long") else 2 if folder in LAST else 1)

    items.sort(key=place)
