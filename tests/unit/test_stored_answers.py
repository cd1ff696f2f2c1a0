"""Answers that came while no controller was attached: stored within bounds, and what was discarded is reported."""

import random
from collections.abc import Callable, Iterator

import pytest

from monarch_nb.runtime.stored_answers import MOST, StoredAnswers, UnreadCalls
from monarch_nb.settings import settings
from monarch_nb.transport.memory.clock import VirtualClock
from monarch_nb.wire import Header, Kind, Status, encode_exception

pytestmark = pytest.mark.timeout(10)

CONTROLLER = "h/c1.0.0"


class Call:
    """A pending call, as far as used."""

    def __init__(self) -> None:
        self.unread: tuple[int, ...] = ()
        self.on_read: Callable[[], object] = lambda: None
        self.waits = True


class Mesh:
    """A controller with one rank."""

    def __init__(self) -> None:
        self.clock, self.rank = VirtualClock(), StoredAnswers()
        self.sent: list[tuple[int, ...]] = []
        self.calls = UnreadCalls(self.clock, self.sent.append)

    def call(self) -> Call:
        call = Call()
        self.calls.add(call)  # type: ignore[arg-type]
        return call

    def answer(self, call: Call) -> None:
        header = Header(Kind.CALL, "h/p1.0.0", CONTROLLER, mesh="m1", method="step", port=1,
                        call=f"{CONTROLLER}:{call.unread[0]}", unread=call.unread)  # fmt: skip
        self.rank.store(header, Status.VALUE, [b"x"], CONTROLLER)

    def stored(self) -> list[int]:
        return [answer.unread for answer in self.rank._all if answer.sent_to]


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
    [reply] = answers.of({"m1"})
    assert (reply.endpoint, reply.rank, reply.index, reply.extent, reply.size) == ("step", 3, 1, (("gpus",), (2,)), 8)
    assert answers.body(reply.number) == [b"head", b"body"]
    assert [reply.mesh for reply in answers.take_new({"m1", "m2"})] == ["m1", "m2"]
    assert answers.take_new({"m1", "m2"}) == []
    answers.forget([reply.number])
    assert answers.body(reply.number) is None
    assert [reply.mesh for reply in answers.of({"m1", "m2"})] == ["m2"]


@pytest.mark.usefixtures("small")
def test_older_answers_make_room_and_oversized_ones_are_only_noted() -> None:
    answers = StoredAnswers()
    for size in (600, 1001, 300, 200):
        answers.store(request(), Status.VALUE, [bytes(size)])
    assert [(answer.size, answer.frames is not None) for answer in answers.of({"m1"})] == [
        (600, False), (1001, False), (300, True), (200, True),
    ]  # fmt: skip


def test_of_very_many_only_the_newest_are_known() -> None:
    answers = StoredAnswers()
    for number in range(MOST + 5):
        answers.store(request(f"c:{number}"), Status.VALUE, [b"x"])
    assert [answer.call for answer in answers.of({"m1"})] == [f"c:{number}" for number in range(5, MOST + 5)]


def test_errors_are_stored_as_a_line_and_dead_actors_keep_nothing() -> None:
    answers = StoredAnswers()
    answers.store(request(), Status.EXCEPTION, encode_exception(ValueError("no such step")))
    answers.store(request(), Status.FAILURE, [b"\x80 no pickle"])
    raised, failed = answers.of({"m1"})
    assert raised.error == "ValueError: no such step"
    assert raised.frames is not None
    assert (failed.error, failed.frames) == ("its actor had failed", None)


def test_answers_are_listed_only_once_their_controller_has_left() -> None:
    mesh = Mesh()
    first, second = mesh.call(), mesh.call()
    for call in (first, second):
        mesh.answer(call)
    assert mesh.rank.of({"m1"}) == []
    first.on_read()
    mesh.rank.discard_read(CONTROLLER, mesh.calls.state())
    mesh.rank.release({CONTROLLER})
    assert [answer.call for answer in mesh.rank.of({"m1"})] == [f"{CONTROLLER}:2"]


def test_reads_are_announced_after_a_pause_and_then_never_again() -> None:
    mesh = Mesh()
    calls = [mesh.call() for _ in range(3)]
    calls[0].on_read()
    del calls[1]  # a future that nobody has is as good as read
    mesh.clock.advance(1.0)
    assert mesh.sent == [(4, 3)]
    mesh.clock.advance(60.0)
    assert len(mesh.sent) == 1
    calls[-1].on_read()
    mesh.clock.advance(60.0)
    assert mesh.sent == [(4, 3), (4,)]
    assert mesh.clock.next_due is None


def test_while_calls_follow_each_other_nothing_is_announced() -> None:
    mesh = Mesh()
    for _ in range(50):
        mesh.call().on_read()
        mesh.clock.advance(0.1)
    assert mesh.sent == []
    mesh.clock.advance(1.0)
    assert mesh.sent == [(51,)]


def test_detaching_counts_calls_that_have_a_result_as_read() -> None:
    mesh = Mesh()
    done, waiting = mesh.call(), mesh.call()
    done.waits = False
    assert mesh.calls.state(waiting_only=True) == (3, 2)
    assert waiting.waits


@pytest.mark.parametrize("seed", range(20))
def test_no_unread_answer_is_ever_discarded_in_whatever_order_messages_come(seed: int) -> None:
    choose, mesh = random.Random(seed), Mesh()
    unread: dict[int, Call] = {}
    messages: list[tuple[int, ...]] = []  # on their way
    answered: set[int] = set()
    for _ in range(300):
        match choose.randrange(4):
            case 0 | 1:
                call = mesh.call()
                unread[call.unread[0]] = call
                messages.append(call.unread)
            case 2 if unread:
                number = choose.choice(list(unread))
                call = unread.pop(number)
                call.on_read()
                del call
            case 3 if messages:
                message = messages.pop(choose.randrange(len(messages)))
                mesh.rank.discard_read(CONTROLLER, message)
                if message[0] in unread:
                    mesh.answer(unread[message[0]])
                    answered.add(message[0])
        assert answered & set(unread) <= set(mesh.stored())
    for call in unread.values():
        call.on_read()
    unread.clear()
    mesh.rank.discard_read(CONTROLLER, mesh.calls.state())
    assert mesh.stored() == []
