"""Shared by the tests of actors: processes, and a record of unhandled failures."""

import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, MeshFailure, ProcMesh, this_host
from monarch_nb.connect import shutdown
from tests.effort import WITH_TORCH

ACTORS = re.compile("tests/cluster/test_actor_")
SECONDS = 40.0  # more than anything here takes; a test that needs it has failed


class Faults:
    """The failures that reached `unhandled_fault_hook`, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[MeshFailure] = queue.Queue()

    def __call__(self, failure: MeshFailure) -> None:
        self._queue.put(failure)

    def next(self) -> MeshFailure:
        return self._queue.get(timeout=SECONDS)

    def left(self) -> list[MeshFailure]:
        failures = []
        while not self._queue.empty():
            failures.append(self._queue.get())
        return failures


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Takes the place of the hook that would end the program; every failure has to be claimed by the test."""
    hook = Faults()
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", hook)
    yield hook
    assert hook.left() == []


def spawned(count: int, name: str, **kwargs: Any) -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs(per_host={"gpus": count}, name=name, **kwargs)
    procs.initialized.get(60)
    yield procs
    procs.stop().get(SECONDS)


def joined(kind: type[Actor]) -> Iterator[Any]:
    """Three actors, whose `join` makes a process group of torch.distributed."""
    procs = spawned(3, "workers")
    mesh: Any = next(procs).spawn("trainers", kind)
    mesh.join.call().get(SECONDS)
    yield mesh
    next(procs, None)


def line_of(file: str, text: str) -> str:
    """`file:line` of the only line with that text."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture(scope="module")
def quad() -> Iterator[ProcMesh]:
    """Four processes that all tests of a module share: leave them alive."""
    yield from spawned(4, "shared")


@pytest.fixture
def own_procs() -> Iterator[ProcMesh]:
    """Two processes of one test alone: it may kill them."""
    yield from spawned(2, "own")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Each family of tests shares a controller; its last test shuts it down, since others count threads and files."""
    if (ours := _family(item.path)) and (nextitem is None or _family(nextitem.path) != ours):
        shutdown()


def _family(path: Path) -> str:
    return next((family.pattern for family in (*WITH_TORCH, ACTORS) if family.search(path.as_posix())), "")
