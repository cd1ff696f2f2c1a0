"""For all tests: their effort, and the set-up of the hundreds of processes that they start."""

import asyncio
import atexit
import functools
import gc
import importlib
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.effort import EFFORT, WITH_TORCH, tries

FOLDER = Path(__file__).resolve().parent

# Without torch and numpy, which cost each host agent a second; tests that need them set it themselves.
os.environ.setdefault("MONARCH_NB_PRELOAD", "")
# Files of meshes that outlive their controllers are those of this run alone.
os.environ["XDG_STATE_HOME"] = os.environ.get("MONARCH_TEST_STATE") or tempfile.mkdtemp(prefix="mnb-state-")
if "MONARCH_TEST_STATE" not in os.environ:
    os.environ["MONARCH_TEST_STATE"] = os.environ["XDG_STATE_HOME"]
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# Compiled once, not in each process; the tests themselves too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ours", max_examples=tries(60), deadline=None, derandomize=EFFORT == 1, print_blob=True, database=None
)
settings.load_profile("ours")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start read test modules without importing pytest, which costs more than all else they do."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        light, path = str(FOLDER / "light"), os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([light, *([path] if path else [])])
        sys.path.insert(0, light)  # processes of meshes have the path of their controller


# A hang is reported after this many times its limit at the latest, however busy the machine is.
LONGEST_LIMIT = 10


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Extends the limit of a test on a busy machine: limits are in seconds of a machine with a core for each program.

    Programs that a test runs and waits for need no limit of their own: they are killed when this one expires.
    """
    programs_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    factor = min(max(programs_per_core, 1.0), LONGEST_LIMIT)
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout * factor))


_last_test = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails where an earlier test has left an event loop running in this thread: no other could run."""
    before = item.session.stash.get(_last_test, "no test")
    item.session.stash[_last_test] = item.nodeid
    loop = asyncio._get_running_loop()
    if loop is not None and item.path.parent.name not in ("browser", "frameworks"):  # a browser's driver has one
        asyncio._set_running_loop(None)
        pytest.fail(f"{before}, which ran before, has left {loop} running")


# Modules of sharded tensors: they need this release of PyTorch or a later one.
TENSORS = re.compile(
    r"tests/(random_programs/|models/|cluster/test_tensor_|notebook/test_tensors_|notebook/test_example_tensors"
    r"|unit/test_tensor_|unit/test_placement|unit/test_site|unit/test_checkpoint_folders|unit/test_cuda_graph"
    r"|unit/test_gradient_generator|unit/test_simulated_timeline"
    r"|cluster/test_(collectives|lightning_trainer|memory_growth|nonfinite|planted_faults|replicas|stragglers))"
)
TENSORS_SINCE = (2, 10)


@functools.cache
def too_old_for_tensors() -> str:
    """The version of an installed PyTorch that has no sharded tensors; empty for others, and where there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    major, minor = version.split(".")[:2]
    return version if (int(major), int(minor)) < TENSORS_SINCE else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names modules that were not collected."""
    if version := too_old_for_tensors():
        since = ".".join(map(str, TENSORS_SINCE))
        terminalreporter.write_line(f"NOT TESTED HERE: sharded tensors need PyTorch {since}, and this is {version}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skips a test of a name that only newer versions of PyTorch have."""
    try:
        return (yield)
    except ImportError as error:
        if too_old_for_tensors() and "sharded tensors need PyTorch" in str(error):
            pytest.skip(f"NOT TESTED HERE: {error}")
        raise


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    name = collection_path.relative_to(FOLDER.parent).as_posix()
    untestable = collection_path.suffix == ".py" and TENSORS.match(name) is not None and too_old_for_tensors() != ""
    return untestable or None


def pytest_collection_finish() -> None:
    """Tests and their modules stay until the end: collections that tests request can skip them."""
    gc.collect()
    gc.freeze()


# Modules that take a minute and more begin first, so that none is waited for at the end. Modules of one line share
# something dear, and so run one after the other in one process: a browser, a kernel or a host that has imported torch.
FIRST = [
    re.compile(r"tests/browser/"),
    re.compile(r"tests/notebook/test_(example_|pages|rank_tensors|tensors_life|watch|why)"),
    *WITH_TORCH,
    re.compile(r"tests/soak/"),
]
LAST = ("memory_network", "unit")  # folders of which no test takes long


def group_of(nodeid: str) -> int | None:
    """The index in FIRST."""
    return next((index for index, pattern in enumerate(FIRST) if pattern.match(nodeid)), None)


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker one module at a time, or all modules of one group of FIRST.

    `--dist loadgroup` with `xdist_group` marks would do the same, but appends the group to the id of every test.
    """

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid)
        return str(super()._split_scope(nodeid)) if group is None else FIRST[group].pattern


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin before others; tests that start no process come last."""

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        group = group_of(item.nodeid)
        if group is None:
            group = len(FIRST) + (0 if item.get_closest_marker("long") else 2 if item.path.parent.name in LAST else 1)
        example = item.path.name.startswith("test_example_")  # takes a kernel that was used; pages want a new one
        return group, item.get_closest_marker("last") is not None, example

    items.sort(key=order)
