"""Several replies in one message."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.wire import Folded, Header, Kind, Status, fold, unfold, unfold_each


def _reply(index, status=Status.VALUE, log=None):
    position = index * 10 if log is None else log
    return Header(Kind.REPLY, "h/c.0.0", f"h/p.{index}.0", port=9, index=index, status=status, log=position)


TWO = [Folded.of(_reply(2), [b"two", b"buffer"]), Folded.of(_reply(0, Status.EXCEPTION), [b"zero"])]


def test_replies_come_out_as_they_went_in():
    body = fold(TWO)
    folded = Header(Kind.FOLDED, "h/c.0.0", "h/agent", port=7, call="k")
    replies = list(unfold_each(folded, body))
    assert [(h.index, h.status, h.port, h.call) for h, _ in replies] == [
        (2, Status.VALUE, 7, "k"),
        (0, Status.EXCEPTION, 7, "k"),
    ]
    assert [frames for _, frames in replies] == [[b"two", b"buffer"], [b"zero"]]
    assert [reply.logs for reply in unfold(folded, body)] == [(("h/p.2.0", 20),), ()]


def test_equal_small_answers_are_stored_once_with_all_their_ranks():
    ranks = [rank for rank in range(80_000) if rank != 7]
    body = fold([*(Folded.of(_reply(rank, log=0), [b"None"]) for rank in ranks), Folded.of(_reply(7), [b"seven"])])
    assert len(body) == 3
    assert sum(map(len, body)) < 100
    same, single = unfold(Header(Kind.FOLDED, "h/c.0.0", "h/agent"), body)
    assert same.places == [range(7), range(8, 80_000)]
    assert (single.places, single.logs) == ([range(7, 8)], (("h/p.7.0", 70),))
    combined = fold([same, Folded.of(_reply(7, log=0), [b"None"])])
    assert [reply.places for reply in unfold(Header(Kind.FOLDED, "", ""), combined)] == [[range(80_000)]]


@pytest.mark.parametrize("frames", [[b"pickle", b"memory of its own"], [bytes(2000)]])
def test_answers_with_memory_of_their_own_or_large_ones_stay_apart(frames):
    body = fold([Folded.of(_reply(rank), frames) for rank in range(3)])
    assert len(unfold(Header(Kind.FOLDED, "", ""), body)) == 3


def test_errors_are_not_taken_for_values_with_the_same_bytes():
    body = fold([Folded.of(_reply(rank, Status(rank)), [b"x"]) for rank in (0, 1)])
    assert [reply.header.status for reply in unfold(Header(Kind.FOLDED, "", ""), body)] == [0, 1]


DAMAGE = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=6)


@pytest.mark.fuzz
@given(st.binary(max_size=200), DAMAGE, st.integers(0, 4))
def test_any_bytes_are_replies_or_refused(data, changes, count):
    good, *frames = fold(TWO)
    damaged = bytearray(good)
    for index, value in changes:
        damaged[index % len(damaged)] = value
    for first in (data, bytes(damaged)):
        try:
            replies = unfold(Header(Kind.FOLDED, "h/c.0.0", "h/agent", port=7), [first, *frames[:count]])
        except msgspec.DecodeError:  # ValidationError is one
            continue
        assert all(isinstance(reply.header, Header) for reply in replies)


@pytest.mark.parametrize("frames", [-1, 0, 2, 1 << 60])
def test_replies_that_name_other_frames_than_there_are_are_refused(frames):
    part = [[[0, 1]], 0, frames, []]
    for tail in ([], [b"one"]):
        if len(tail) == frames:
            continue
        with pytest.raises(msgspec.DecodeError):
            unfold(Header(Kind.FOLDED, "a/b", "c/d"), [msgspec.msgpack.encode([part]), *tail])
    with pytest.raises(msgspec.DecodeError):
        unfold(Header(Kind.FOLDED, "a/b", "c/d"), [])


@pytest.mark.parametrize("places", [[], [[0, 0]], [[-1, 1]], [[0, 1 << 60]], [[0, -1], [0, 2]]])
def test_replies_of_no_ranks_or_too_many_are_refused(places):
    with pytest.raises(msgspec.DecodeError):
        unfold(Header(Kind.FOLDED, "a/b", "c/d"), [msgspec.msgpack.encode([[places, 0, 0, []]])])


def test_a_garbled_folded_answer_is_refused():
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        unfold(Header(Kind.FOLDED, "a/b", "c/d"), [b"\xc1garbage"])
