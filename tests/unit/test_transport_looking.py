"""Waiting that looks before it sleeps: only where processors are to spare, for a moment, and given up at once."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_nb.transport import reader as reader_module
from monarch_nb.transport.looking import (
    FIRST_MISS_S,
    FIRST_REST_S,
    FRESH_S,
    LAST_MISS_S,
    LAST_REST_S,
    LOOK_S,
    Host,
    Looking,
    host_of,
)
from monarch_nb.transport.reader import Reader
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(60))
ROOMY = Host(64, 9, 0.0)


@pytest.mark.parametrize(
    ("host", "spares"),
    [
        (Host(20, 9, 0.0), True),
        (Host(19, 9, 0.0), False),  # a thread that works and one that looks for each, and two for others
        (Host(2, 1, 0.0), False),
        (Host(64, 9, 0.99), True),
        (Host(64, 9, 1.0), False),
        (Host(64, 9, None), False),  # the kernel does not tell
        (Host(64, 0, 0.0), False),  # how many of ours there are is not known
        (Host(0, 1, 0.0), False),
    ],
)
def test_processors_are_to_spare_where_that_is_certain(host: Host, spares: bool) -> None:
    assert host.spares is spares
    assert bool(Looking("auto", lambda: host).seconds(0.0)) is spares


def test_on_and_off_do_not_ask_the_host() -> None:
    def asked() -> Host:
        raise AssertionError

    assert Looking("off", asked).seconds(0.0) == 0.0
    assert Looking("on", asked).seconds(0.0) == LOOK_S


def test_the_host_is_asked_again_after_a_while() -> None:
    host = [ROOMY]
    looking = Looking("auto", lambda: host[0])
    assert looking.seconds(0.0)
    host[0] = Host(64, 9, 50.0)
    assert looking.seconds(FRESH_S / 2)
    assert not looking.seconds(FRESH_S)


def rests(looking: Looking, end: Callable[[float], None], count: int) -> list[float]:
    """How long nothing is looked for after each of some looks that end in the same way."""
    now, found = 0.0, []
    for _ in range(count):
        end(now)
        begun = now
        while not looking.seconds(now):
            now += 0.005
        found.append(now - begun)
    return found


def test_where_something_else_runs_between_two_looks_there_are_ever_fewer() -> None:
    looking = Looking("on", lambda: ROOMY)
    assert rests(looking, looking.paused, 8) == pytest.approx(
        [min(FIRST_REST_S * 2**number, LAST_REST_S) for number in range(8)], abs=0.01
    )
    looking.found()
    assert rests(looking, looking.paused, 1) == pytest.approx([FIRST_REST_S], abs=0.01)


def test_a_process_that_waits_for_long_hardly_looks() -> None:
    looking = Looking("on", lambda: ROOMY)
    assert rests(looking, looking.missed, 10)[-1] == pytest.approx(LAST_MISS_S, abs=0.01)
    looking.found()
    assert rests(looking, looking.missed, 1) == pytest.approx([FIRST_MISS_S], abs=0.01)


def test_the_facts_of_this_host_are_found(tmp_path: Path) -> None:
    host = host_of(tmp_path)
    assert host.processes == 0
    assert 0 < host.processors <= (os.cpu_count() or 1)
    assert host.pressure is None or 0 <= host.pressure <= 100


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setattr(reader_module, "PAUSE_S", 10.0)  # other tests want the processor too
    reader = Reader("test-looking", 0.02)
    reader.start()
    yield reader
    reader.stop()
    reader.run_calls()
    reader.close()


class Patient(Looking):
    """Looks for as long as it takes."""

    def seconds(self, now: float) -> float:
        return 30.0


def test_a_thread_that_looks_reads_by_itself_as_the_reading_thread_would(reader: Reader) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    found: list[tuple[bytes, bool]] = []

    def readable() -> bool:
        try:
            found.append((os.read(read, 1), reader.ident == threading.get_ident()))
        except BlockingIOError:
            pass
        return False

    reader.watch(read, readable)
    patient = Patient("on", lambda: ROOMY)
    for number in range(50):
        os.write(write, b"x")
        reader.look(lambda number=number: len(found) > number, patient)
    assert found == [(b"x", True)] * 50
    reader.unwatch(read)
    os.close(read)
    os.close(write)


def test_after_a_look_in_vain_the_reading_thread_reads_at_once(reader: Reader) -> None:
    reader.look(lambda: False, Looking("on", lambda: ROOMY))
    called = threading.Event()
    reader.soon(called.set)
    assert called.wait(10)
