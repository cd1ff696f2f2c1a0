"""The reading thread: nothing that was asked of it is forgotten."""

import os
import threading
from collections.abc import Iterator

import pytest

from monarch_nb.transport.reader import Reader

pytestmark = pytest.mark.timeout(60)
SECONDS = 20


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader("a-reader", 0.001)
    made.start()
    yield made
    made.stop()
    made.close()


@pytest.fixture
def silent() -> Iterator[list[int]]:
    """Descriptors that are never readable."""
    pipes = [os.pipe() for _ in range(2)]
    yield [read for read, _ in pipes]
    for ends in pipes:
        for end in ends:
            os.close(end)


def test_what_is_asked_for_while_the_thread_has_something_to_look_at_again_is_not_forgotten(
    reader: Reader, silent: list[int]
) -> None:
    first, second = silent
    looked, inside, go_on = threading.Event(), threading.Event(), threading.Event()

    class Held:
        def tick(self, now: float) -> bool:
            reader.look_again(first)
            inside.set()
            go_on.wait(SECONDS)
            return False

    reader.watch(first, lambda: False)
    reader.watch(second, lambda: bool(looked.set()))
    reader.busy(Held())
    assert inside.wait(SECONDS)
    reader.look_again(second)
    go_on.set()
    assert looked.wait(SECONDS)
