"""For all tests: how much they try, and how the processes they start are set up, hundreds of them."""

import atexit
import contextlib
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
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.effort import EFFORT, tries

HERE = Path(__file__).resolve().parent

# Born without torch and numpy, which cost each host agent a second; tests that want them say so.
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
        light, found = str(HERE / "light"), os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([light, *([found] if found else [])])
        sys.path.insert(0, light)  # processes of meshes have the path of their controller


# Modules that need torch in the process of the tests, which costs a worker four seconds: one worker alone has them.
WITH_TORCH = re.compile(
    r"tests/(cluster/test_tensor_|compat/test_1_1[13]_|memory_network/test_values\."
    r"|unit/test_(tensor_|placement|wire_tensors|rdma_parts|rdma_parameters|compat_pickling|site|stubs|names|compatibility_page))"
)


# Modules of sharded tensors: they are built on what PyTorch has since this release.
TENSORS = re.compile(
    r"tests/(random_programs/|models/|cluster/test_tensor_|notebook/test_tensors_|notebook/test_example_tensors"
    r"|unit/test_tensor_|unit/test_placement|unit/test_site)"
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
    """Modules that nobody has read are named all the same."""
    if version := too_old_for_tensors():
        since = ".".join(map(str, TENSORS_SINCE))
        terminalreporter.write_line(f"NOT TESTED HERE: sharded tensors need PyTorch {since}, and this is {version}")


def elsewhere(path: Path, config: pytest.Config) -> bool:
    """Whether a module is another worker's, where several share all tests. The first has all, as one that takes the
    place of a worker that has crashed."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if not 0 < worker < int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) or not all_of_them(config):
        return False
    return WITH_TORCH.match(path.relative_to(HERE.parent).as_posix()) is not None


def all_of_them(config: pytest.Config) -> bool:
    return [config.rootpath / one for one in config.args] == [HERE]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.relative_to(HERE.parent).as_posix()
    untestable = collection_path.suffix == ".py" and TENSORS.match(name) is not None and too_old_for_tensors() != ""
    return untestable or elsewhere(collection_path, config) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker reads other modules first: what pytest makes of their asserts is then made once, not by all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not all_of_them(session.config):
        return
    files = [path for folder in session.config.getini("python_files") for path in sorted(HERE.rglob(folder))]
    for path in files[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        if elsewhere(path, session.config):
            continue
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Tests and their modules are there to stay: collections, which tests ask for, need not look at them."""
    gc.collect()
    gc.freeze()


# What takes a minute and more begins first, so that nobody waits for it at the end. Modules of one line share what is
# dear, and so run one after the other in one process: a browser, a kernel or a host that has imported torch.
FIRST = [
    re.compile(r"tests/browser/"),
    re.compile(r"tests/notebook/test_(example_|pages|tensors_life)"),
    re.compile(r"tests/cluster/test_tensor_"),
    re.compile(r"tests/soak/"),
]
LAST = ("memory_network", "unit")  # folders of which no test takes long


def place(nodeid: str) -> int | None:
    """Which of FIRST it is."""
    return next((at for at, line in enumerate(FIRST) if line.match(nodeid)), None)


class FilesTogether(LoadFileScheduling):  # type: ignore[misc]
    """A module at a time, or those that share what is dear; each to a worker that has it."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        at = place(file)
        return file if at is None else FIRST[at].pattern

    def _check_nodes_have_same_collection(self) -> bool:
        """The one that has all of them comes first, and what the others have is part of that."""
        longest_first = sorted(self.registered_collections.items(), key=lambda item: -len(item[1]))
        self.registered_collections = dict(longest_first)
        (_, every), *others = longest_first
        self.config.pluginmanager.get_plugin("session").testscollected = len(
            every
        )  # of which so many per cent are done
        return all(set(every).issuperset(collection) for _, collection in others)

    def _assign_work_unit(self, node: Any) -> None:
        """What no other worker has comes first, and then what is next in order."""
        mine = set(self.registered_collections[node])
        others = [set(self.registered_collections[other]) for other in self.nodes if other is not node]
        can = [scope for scope, unit in self.workqueue.items() if mine.issuperset(unit)]
        if not can:
            node.shutdown()
            return
        alone = (scope for scope in can if not any(have.issuperset(self.workqueue[scope]) for have in others))
        self.workqueue.move_to_end(next(alone, can[0]), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins before others; what starts no process comes last."""

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        at = place(item.nodeid)
        if at is None:
            at = len(FIRST) + (0 if item.get_closest_marker("long") else 2 if item.path.parent.name in LAST else 1)
        example = item.path.name.startswith("test_example_")  # takes a kernel that was used; pages want a new one
        return at, item.get_closest_marker("last") is not None, example

    items.sort(key=order)
