"""call, call_one, choose, stream, broadcast and send."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, ValueMesh, current_rank, endpoint, send

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Worker(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def note(self, x: int) -> None:
        self.seen.append(x)

    @endpoint
    def notes(self) -> list[int]:
        return self.seen

    @endpoint
    def when_told(self, port: Port[Port[None]]) -> int:
        key, receiver = Channel[None].open()
        port.send(key)
        receiver.recv().get(20)
        return current_rank().rank

    @endpoint
    def fail_on(self, ranks: list[int]) -> int:
        if current_rank().rank in ranks:
            raise ValueError(f"rank {current_rank().rank}")
        return 1

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[int], x: int) -> str:
        port.send(x + current_rank().rank)
        return "ignored"


@pytest.fixture(scope="module")
def workers(quad: ProcMesh) -> Any:
    return quad.spawn("workers", Worker)


def test_call_answers_with_a_value_for_each_member(workers: Any) -> None:
    values = workers.rank.call().get(20)
    assert isinstance(values, ValueMesh)
    assert list(values.items()) == [(point, point.rank) for point, _ in values]
    assert values.item(gpus=2) == 2
    assert values.slice(gpus=slice(1, 3)).values() == [1, 2]


def test_call_one_needs_exactly_one(workers: Any) -> None:
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 4"):
        workers.rank.call_one()
    assert workers.slice(gpus=3).rank.call_one().get(20) == 0
    assert workers.slice(gpus=slice(3, 4)).rank.call_one().get(20) == 0


def test_choose_picks_any_member(workers: Any) -> None:
    for future in [workers.note.choose(7) for _ in range(100)]:
        future.get(20)
    counts = [len([x for x in notes if x == 7]) for notes in workers.notes.call().get(20).values()]
    assert sum(counts) == 100
    assert min(counts) > 0


def test_stream_gives_answers_as_they_arrive(workers: Any) -> None:
    port, receiver = Channel[Port[None]].open_ranked()
    stream = iter(workers.when_told.stream(port))
    keys = dict(receiver.recv().get(20) for _ in range(4))
    order = []
    for rank in (3, 2, 1, 0):  # each only once the one before has arrived
        keys[rank].send(None)
        order.append(next(stream).get(20))
    assert order == [3, 2, 1, 0]


def test_stream_sends_at_once_and_gives_one_future_per_rank(workers: Any) -> None:
    stream = workers.note.stream(11)
    assert all(11 in notes for notes in workers.notes.call().get(20).values())
    assert [future.get(20) for future in stream] == [None] * 4


def test_an_error_in_a_stream_is_that_of_one_future(workers: Any) -> None:
    outcomes = [future.exception(20) for future in workers.fail_on.stream([1, 2])]
    assert len(outcomes) == 4
    assert sum(isinstance(outcome, ActorError) for outcome in outcomes) == 2


def test_broadcast_returns_at_once_and_is_in_order_with_calls(workers: Any) -> None:
    assert workers.note.broadcast(13) is None
    assert all(13 in notes for notes in workers.notes.call().get(20).values())


def test_the_message_is_sent_when_the_adverb_is_called(workers: Any) -> None:
    workers.note.call(17)
    assert all(17 in notes for notes in workers.notes.call().get(20).values())


def test_the_first_error_in_rank_order_is_raised(workers: Any) -> None:
    for ranks in ([1, 3], [3, 1], [0, 1, 2, 3]):
        with pytest.raises(ActorError, match=f"rank {min(ranks)}"):
            workers.fail_on.call(ranks).get(20)


def test_send_delivers_each_answer_to_a_port(workers: Any) -> None:
    port, receiver = Channel[int].open_ranked()
    send(workers.rank, (), {}, port)
    assert sorted(receiver.recv().get(20) for _ in range(4)) == [(n, n) for n in range(4)]
    send(workers.slice(gpus=slice(2, 4)).rank, (), {}, port, selection="choose")
    rank, value = receiver.recv().get(20)
    assert rank == value
    with pytest.raises(TypeError, match=r"workers\.rank"):
        send(workers.rank, (1,), {})


def test_send_delivers_errors_to_the_port(workers: Any) -> None:
    port, receiver = Channel[int].open()
    send(workers.slice(gpus=0).fail_on, ([0],), {}, port)
    with pytest.raises(Exception, match="rank 0"):
        receiver.recv().get(20)


def test_an_explicit_response_port_answers_the_call(workers: Any) -> None:
    assert workers.by_port.call(10).get(20).values() == [10, 11, 12, 13]
    assert sorted(future.get(20) for future in workers.by_port.stream(10)) == [10, 11, 12, 13]
