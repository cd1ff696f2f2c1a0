"""Errors in futures that nobody reads are reported, once, and only those."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint
from monarch_nb.lifecycle import interrupts
from monarch_nb.runtime import reported_elsewhere, unretrieved
from monarch_nb.testing import in_process_host
from tests.cluster.actor_tools import SECONDS
from tests.polling import until

pytestmark = pytest.mark.timeout(60)


GATE = threading.Event()  # the actors run in this process
BEGUN = threading.Semaphore(0)


class Divider(Actor):
    """Fails at once, or when the gate opens."""

    @endpoint
    def divide(self, x: float) -> float:
        return 1 / x

    @endpoint
    def late(self, x: float) -> float:
        BEGUN.release()
        assert GATE.wait(SECONDS)
        return 1 / x


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = in_process_host().spawn_procs(per_host={"gpus": 2}, name="here")
    mesh.initialized.get(SECONDS)
    yield mesh
    mesh.stop().get(SECONDS)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    GATE.clear()
    errors: list[tuple[str, int]] = []

    def tell(error: BaseException, count: int) -> None:
        assert isinstance(error, ActorError)
        errors.append((repr(error.exception), count))

    monkeypatch.setattr(unretrieved, "report", tell)
    return errors


def expect_no_more(mesh: Any, log: list[tuple[str, int]]) -> None:
    """Drops one more future, alone: all earlier reports have arrived by then."""
    before = len(log)
    mesh.divide.call("x")
    until(lambda: len(log) > before)
    assert [kind for kind, _ in log[before:]] == ["TypeError(\"unsupported operand type(s) for /: 'int' and 'str'\")"]


def test_the_error_of_a_dropped_call_is_shown_when_it_comes(procs: ProcMesh, log: list[tuple[str, int]]) -> None:
    mesh = procs.spawn("a", Divider)
    mesh.initialized.get(SECONDS)
    mesh.late.call(0)
    mesh.late.call(1)
    assert log == []
    GATE.set()
    until(lambda: log)
    assert log == [("ZeroDivisionError('division by zero')", 1)]


def test_only_futures_dropped_unread_count_as_unretrieved(procs: ProcMesh, log: list[tuple[str, int]]) -> None:
    mesh = procs.spawn("b", Divider)
    kept, dropped, read = (mesh.divide.call(0) for _ in range(3))
    with pytest.raises(ActorError, match="division by zero"):
        read.get(SECONDS)
    del read
    expect_no_more(mesh, log)
    del dropped
    until(lambda: len(log) > 1)
    assert log[1:] == [("ZeroDivisionError('division by zero')", 1)]
    with pytest.raises(ActorError, match="division by zero"):
        kept.get()
    del kept
    expect_no_more(mesh, log)


def test_an_error_reported_elsewhere_is_not_reported_for_a_dropped_future(
    procs: ProcMesh, log: list[tuple[str, int]]
) -> None:
    mesh = procs.spawn("f", Divider)
    before, after = mesh.late.call(0), mesh.divide.call(0)
    reported_elsewhere(before)  # its failure is not known yet
    GATE.set()
    after.wait(SECONDS)
    reported_elsewhere(after)
    del before, after
    expect_no_more(mesh, log)


def test_futures_dropped_together_are_reported_once(procs: ProcMesh, log: list[tuple[str, int]]) -> None:
    mesh = procs.spawn("c", Divider)
    for _ in range(50):
        mesh.divide.call(0)
    until(lambda: sum(count for _, count in log) == 50)
    assert len(log) < 25
    mesh.slice(gpus=1).divide.call_one(0)
    mesh.divide.choose(0)
    until(lambda: sum(count for _, count in log) == 52)


def test_cancelled_or_interrupted_calls_are_not_reported_when_dropped(
    procs: ProcMesh, log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "SILENT_AFTER", 0.3)
    mesh = procs.spawn("d", Divider)
    mesh.late.call(0).cancel()
    GATE.set()
    expect_no_more(mesh, log)
    GATE.clear()
    while BEGUN.acquire(blocking=False):
        pass
    mesh.slice(gpus=0).late.call_one(0)
    mesh.slice(gpus=1).late.call_one(1)
    for _ in range(2):
        assert BEGUN.acquire(timeout=SECONDS)
    interrupts.interrupted(mesh._state, [0, 1])
    GATE.set()
    mesh.divide.call(1).get(SECONDS)
    expect_no_more(mesh, log)


def test_a_future_says_how_it_stands_and_that_get_is_missing(procs: ProcMesh) -> None:
    GATE.clear()
    mesh = procs.spawn("e", Divider)
    future: Any = mesh.late.call(1)
    assert repr(future) == "<Future pending: 0 of 2 ranks have answered e.late()>"
    for use in (
        lambda: future + 1,
        lambda: 2 * future,
        lambda: future[0],
        lambda: list(future),
        lambda: len(future),
        lambda: future < 2,
        lambda: float(future),
        lambda: future.values(),
        lambda: future.item(gpus=0),
    ):
        with pytest.raises((TypeError, AttributeError), match=r"`\.get\(\)` is missing"):
            use()
    assert bool(future)
    assert not callable(future)
    assert not hasattr(future, "_repr_html_")
    GATE.set()
    assert future.get(SECONDS).values() == [1.0, 1.0]
    assert repr(future) == "<Future done>"
    failure = mesh.divide.call(0)
    until(failure.done)
    assert repr(failure) == "<Future failed: ZeroDivisionError: division by zero>"


def test_errors_of_a_stream_that_nobody_reads_are_shown_once(procs: ProcMesh, log: list[tuple[str, int]]) -> None:
    mesh = procs.spawn("f", Divider)
    unread: Any = mesh.divide.stream(0)
    del unread
    until(lambda: log)
    assert log == [("ZeroDivisionError('division by zero')", 1)]
    for future in mesh.divide.stream(0):
        with pytest.raises(ActorError, match="division by zero"):
            future.get(SECONDS)
        break  # like an uncaught error
    del future
    expect_no_more(mesh, log)
    assert [future.get(SECONDS) for future in mesh.divide.stream(2)] == [0.5, 0.5]
    for future in mesh.divide.stream(0):
        assert future.done() in (False, True)
    del future
    until(lambda: len(log) > 2)
    assert log[2:] == [("ZeroDivisionError('division by zero')", 1)]
