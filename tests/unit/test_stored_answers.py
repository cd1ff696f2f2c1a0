"""Answers that came while no controller was attached: stored within bounds, and what was discarded is reported."""

from collections.abc import Iterator

import pytest

from monarch_nb.runtime.stored_answers import MOST, StoredAnswers
from monarch_nb.settings import settings
from monarch_nb.wire import Header, Kind, Status, encode_exception

pytestmark = pytest.mark.timeout(10)


@pytest.fixture
def small() -> Iterator[None]:
    """A process keeps a thousand bytes."""
    before = settings.runtime()
    settings.configure({"kept_results_size": 1000})
    yield
    settings.replace(before)


def request(call: str = "h/c1.0.0:1", mesh: str = "m1") -> Header:
    return Header(Kind.CALL, "h/p1.0.0", "h/c1.0.0", mesh=mesh, rank=3, method="step", index=1, call=call,
                  extent=(("gpus",), (2,)))  # fmt: skip


def test_a_stored_answer_stays_with_its_rank_until_it_is_released() -> None:
    answers = StoredAnswers()
    answers.store(request(), Status.VALUE, [b"head", bytearray(b"body")])
    answers.store(request(mesh="m2"), Status.VALUE, [b"other"])
    [one] = answers.of({"m1"})
    assert (one.endpoint, one.rank, one.index, one.extent, one.size) == ("step", 3, 1, (("gpus",), (2,)), 8)
    assert answers.body(one.number) == [b"head", b"body"]
    assert [one.mesh for one in answers.take_new({"m1", "m2"})] == ["m1", "m2"]
    assert answers.take_new({"m1", "m2"}) == []
    answers.forget([one.number])
    assert answers.body(one.number) is None
    assert [one.mesh for one in answers.of({"m1", "m2"})] == ["m2"]


@pytest.mark.usefixtures("small")
def test_older_answers_make_room_and_oversized_ones_are_only_noted() -> None:
    answers = StoredAnswers()
    for size in (600, 1001, 300, 200):
        answers.store(request(), Status.VALUE, [bytes(size)])
    assert [(one.size, one.frames is not None) for one in answers.of({"m1"})] == [
        (600, False), (1001, False), (300, True), (200, True),
    ]  # fmt: skip


def test_of_very_many_only_the_newest_are_known() -> None:
    answers = StoredAnswers()
    for number in range(MOST + 5):
        answers.store(request(f"c:{number}"), Status.VALUE, [b"x"])
    assert [one.call for one in answers.of({"m1"})] == [f"c:{number}" for number in range(5, MOST + 5)]


def test_errors_are_stored_as_a_line_and_dead_actors_keep_nothing() -> None:
    answers = StoredAnswers()
    answers.store(request(), Status.EXCEPTION, encode_exception(ValueError("no such step")))
    answers.store(request(), Status.FAILURE, [b"\x80 no pickle"])
    raised, failed = answers.of({"m1"})
    assert raised.error == "ValueError: no such step"
    assert raised.frames is not None
    assert (failed.error, failed.frames) == ("its actor had failed", None)
