"""Several replies in one message."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.wire import Header, Kind, Status, fold, unfold


def _reply(index, status=Status.VALUE):
    return Header(Kind.REPLY, "h/c.0.0", f"h/p.{index}.0", port=9, index=index, status=status, log=index * 10)


def test_replies_come_out_as_they_went_in():
    body = fold([(_reply(2), [b"two", b"buffer"]), (_reply(0, Status.EXCEPTION), [b"zero"])])
    folded = Header(Kind.FOLDED, "h/c.0.0", "h/agent", port=7, call="k")
    found = unfold(folded, body)
    assert [(h.index, h.status, h.src, h.log, h.port, h.call) for h, _ in found] == [
        (2, Status.VALUE, "h/p.2.0", 20, 7, "k"),
        (0, Status.EXCEPTION, "h/p.0.0", 0, 7, "k"),
    ]
    assert [frames for _, frames in found] == [[b"two", b"buffer"], [b"zero"]]


DAMAGE = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=6)


@pytest.mark.fuzz
@given(st.binary(max_size=200), DAMAGE, st.integers(0, 4))
def test_any_bytes_are_replies_or_refused(data, changes, kept):
    good, *frames = fold([(_reply(2), [b"two", b"buffer"]), (_reply(0, Status.EXCEPTION), [b"zero"])])
    damaged = bytearray(good)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    for first in (data, bytes(damaged)):
        try:
            found = unfold(Header(Kind.FOLDED, "h/c.0.0", "h/agent", port=7), [first, *frames[:kept]])
        except msgspec.DecodeError:  # ValidationError is one
            continue
        assert all(isinstance(header, Header) for header, _ in found)


@pytest.mark.parametrize("frames", [-1, 0, 2, 1 << 60])
def test_replies_that_name_other_frames_than_there_are_are_refused(frames):
    part = [0, 0, "h/p.0.0", 0, frames]
    for there in ([], [b"one"]):
        if len(there) == frames:
            continue
        with pytest.raises(msgspec.DecodeError):
            unfold(Header(Kind.FOLDED, "a/b", "c/d"), [msgspec.msgpack.encode([part]), *there])
    with pytest.raises(msgspec.DecodeError):
        unfold(Header(Kind.FOLDED, "a/b", "c/d"), [])


def test_garbage_is_refused():
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        unfold(Header(Kind.FOLDED, "a/b", "c/d"), [b"\xc1garbage"])
