import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_nb.wire import CastPlan, Header, Kind, Layout, Run, decode_header, encode_header
from tests.effort import tries

LAYOUT = Layout("p1", ("h1", "h2"), 4)
FULL = Header(
    Kind.CAST,
    "h1/agent",
    "h0/c",
    mesh="m",
    sender="s",
    seq=4,
    method="step",
    port=9,
    extent=(("hosts", "gpus"), (2, 4)),
    chain=("a", "b"),
    plan=CastPlan("p1", 4, (Run(0, 8, seq=3),), (0, 1), ("h1", "h2")),
    buffers=((1, 2, 300_000),),
)


def decodes_or_refuses(data):
    try:
        header = decode_header(data)
    except msgspec.DecodeError:  # ValidationError is one
        return
    assert isinstance(header, Header)


def test_header_survives_the_trip():
    assert decode_header(encode_header(FULL)) == FULL
    assert decode_header(memoryview(encode_header(FULL))) == FULL


def test_layout_places_ranks_row_major():
    assert LAYOUT.size == 8
    assert LAYOUT.address(5) == "h2/p1.5.0"
    assert LAYOUT.address(3, 2) == "h1/p1.3.2"


@pytest.mark.fuzz
@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_decode_errors(data):
    decodes_or_refuses(data)


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8), st.integers(0, 10_000))
@settings(max_examples=tries(300))
def test_damaged_headers_raise_nothing_but_decode_errors(changes, cut):
    data = bytearray(encode_header(FULL))
    for index, value in changes:
        data[index % len(data)] = value
    decodes_or_refuses(bytes(data[: cut % (len(data) + 1)]))
    decodes_or_refuses(bytes(data))


@pytest.mark.parametrize(
    "plan",
    [
        CastPlan("p1", 4, (Run(0, 5),), (0,), ("h1",)),
        CastPlan("p1", 4, (Run(0, 4), Run(0, 1)), (0,), ("h1",)),
        CastPlan("p1", 4, (Run(0, -1), Run(0, 2)), (0,), ("h1",)),
        CastPlan("p1", 1 << 60, (Run(0, 1 << 59),), (0,), ("h1",)),
        CastPlan("p1", 0, (Run(0, 0),), (0,), ("h1",)),
        CastPlan("p1", 4, (Run(0, 1),), (0, 1), ("h1",)),
        CastPlan("p1", 4, (Run(0, 1),), (-1,), ("h1",)),
        CastPlan("p1", 4, (), (), ()),
    ],
)
def test_a_cast_to_more_than_its_hosts_have_is_garbage(plan):
    with pytest.raises(msgspec.DecodeError):
        decode_header(encode_header(Header(Kind.CAST, "h1/agent", "h1/c", plan=plan)))


def test_deeply_nested_garbage_does_not_exhaust_the_stack():
    decodes_or_refuses(b"\x91" * 100_000)
    decodes_or_refuses(b"\xdd\xff\xff\xff\xff" * 100)
