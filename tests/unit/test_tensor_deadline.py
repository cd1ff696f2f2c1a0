"""Code that thinks for too long is ended, whatever it does with what ends it; nothing of that is left."""

import sys
import threading
from collections.abc import Callable

import pytest

from monarch_nb.tensor.propagation.deadline import Deadline, TookTooLong

pytestmark = pytest.mark.timeout(60)


def thinks() -> None:
    while True:
        pass


def swallows() -> None:
    try:
        thinks()
    except TookTooLong:
        return


def hides() -> None:
    try:
        thinks()
    except TookTooLong as error:
        raise RuntimeError("something went wrong in C++") from error


@pytest.mark.parametrize("what", [thinks, swallows, hides])
def test_what_takes_too_long_is_ended_whatever_becomes_of_the_exception(what: Callable[[], None]) -> None:
    with pytest.raises(TookTooLong), Deadline(0.05):
        what()


def test_what_is_soon_done_is_left_alone() -> None:
    with Deadline(30.0):
        done = sum(range(1000))
    assert done == 499500
    with pytest.raises(KeyError), Deadline(30.0):
        raise KeyError


def test_one_that_comes_when_the_code_is_done_does_not_arrive_later_and_holds_up_nobody_who_is_traced() -> None:
    deadline = Deadline(30.0)

    def is_late() -> None:
        thread = threading.Thread(target=deadline._end)
        thread.start()
        thread.join()

    caught = 0
    try:
        with deadline:
            is_late()
    except TookTooLong:
        caught += 1
    for _ in range(10_000):  # here it would arrive
        pass
    assert caught == 1

    ended = threading.Event()

    def traced() -> None:
        sys.settrace(lambda frame, event, arg: None)
        for _ in range(1000):
            pass
        sys.settrace(None)
        ended.set()

    threading.Thread(target=traced, daemon=True).start()
    assert ended.wait(20)
