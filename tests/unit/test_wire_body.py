import collections
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.wire import current_codec, decode, encode


def trip(obj, context=None):
    """`obj` as it arrives: frames after the first are copied, as the transport does."""
    first, *rest = encode(obj, context)
    return decode([bytes(first), *copies(rest)], context)


def copies(frames):
    return [bytearray(bytes(frame)) for frame in frames]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=50),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=40,
)


@given(values)
def test_plain_values_survive(value):
    assert trip(value) == value


def code_and_large_bytes():
    """They make a message with a prologue."""
    return (lambda: 1), b"x" * 300_000


@pytest.mark.fuzz
@given(values, st.integers(0, 10**6), st.integers(0, 4), st.booleans(), st.booleans())
def test_a_message_that_lacks_its_end_is_refused(value, cut, count, prologue, table):
    arrays = [np.zeros(5000) for _ in range(5 if table else 1)]
    first, *rest = encode((value, arrays, code_and_large_bytes() if prologue else None))
    with pytest.raises(Exception):  # noqa: B017 - pickle's errors are of many types
        decode([bytes(first)[: cut % len(first)], *copies(rest)])
    if count < len(rest):
        with pytest.raises(Exception):  # noqa: B017
            decode([bytes(first), *copies(rest[:count])])


def test_plain_arguments_are_one_plain_pickle():
    obj = ((1, "a", None, b"x", [1, 2.5]), {"k": (True, {"n": 3})})
    assert encode(obj) == [pickle.dumps(obj, 5)]


def test_a_list_within_itself_survives():
    loop = [1]
    loop.append(loop)
    copy = trip(loop)
    assert copy[1] is copy


def test_aliases_within_a_message_stay_aliases():
    shared = [1]
    first, second = trip((shared, shared))
    assert first is second


@pytest.mark.parametrize("size", [0, 100, 5000, 70_000, 300_000, 3_000_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, str])
def test_bytes_come_back_as_their_exact_type(kind, size):
    value = kind(b"ab" * (size // 2), "ascii") if kind is str else kind(b"ab" * (size // 2))
    copy = trip({"deep": [value, (1, value)], "after": 7})
    assert copy == {"deep": [value, (1, value)], "after": 7}
    assert type(copy["deep"][0]) is kind
    assert copy["deep"][0] is copy["deep"][1][1]


def test_large_bytes_are_not_copied_when_encoding():
    data, more = bytes(1_000_000), bytearray(2_000_000)
    first, *rest = encode([data, "x", {"more": more}])
    assert len(first) < 1000
    assert any(frame is data for frame in rest)
    assert any(frame is more for frame in rest)


def test_arrays_travel_out_of_band_and_arrive_writable():
    array = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    first, *rest = encode({"a": array})
    assert len(first) < 1000
    assert len(rest) == 1
    assert np.shares_memory(np.frombuffer(rest[0], np.uint8), array)
    copy = trip({"a": array})["a"]
    np.testing.assert_array_equal(copy, array)
    copy[0, 0] = -1
    assert array[0, 0] == 0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0),
        np.arange(5),
        np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
        np.arange(20_000.0)[::2],
        np.array([{"a": 1}, None], dtype=object),
        np.arange(200_000.0)[::-1],
    ],
    ids=["empty", "small", "fortran", "strided", "objects", "large reversed"],
)
def test_all_sorts_of_arrays_survive(array):
    np.testing.assert_array_equal(trip([array])[0], array)


def test_many_small_buffers_share_frames_and_a_large_one_is_alone():
    state = {number: np.full(4096, number, np.float32) for number in range(200)}
    state |= {"large": np.arange(100_000), "odd": np.arange(4099, dtype=np.uint8), "again": state[7]}
    first, large, *together = encode(state)
    assert np.shares_memory(np.frombuffer(large, np.uint8), state["large"])
    assert [len(frame) for frame in together] == [200 * 16_384 + 4160], "as many as fit into 4 MiB"
    copy = decode([bytes(first), bytearray(large), *copies(together)])
    for name, array in state.items():
        np.testing.assert_array_equal(copy[name], array)
    assert copy["again"] is copy[7]
    assert copy[0].flags.writeable
    copy[0][:] = -1
    assert (copy[1] == 1).all(), "each has bytes of its own"


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=40), st.booleans())
def test_buffers_of_any_sizes_come_back_in_their_order(sizes, code):
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    frames = encode((arrays, code_and_large_bytes() if code else None))
    largest = 4 << 20
    assert len(frames) <= 2 + sum(size >= 256 << 10 for size in sizes) + max(4, 2 * sum(sizes) // largest)
    copy, _ = decode([bytes(frames[0]), *copies(frames[1:])])
    assert [(array.size, set(array.tolist())) for array in copy] == [
        (size, {number} if size else set()) for number, size in enumerate(sizes)
    ]


def test_bytes_arrays_and_large_lists_mix():
    obj = [bytes(400_000), np.ones(100_000), list(range(100_000)), bytearray(b"z" * 500_000), collections.deque([1])]
    copy = trip(obj)
    assert copy[0] == obj[0]
    np.testing.assert_array_equal(copy[1], obj[1])
    assert copy[2:] == obj[2:]


class Bound:
    def __init__(self, origin):
        self.origin = origin

    def __reduce__(self):
        return rebind, (current_codec(),)


def rebind(sent_from):
    return (sent_from, current_codec())


def test_objects_see_the_process_they_are_encoded_and_decoded_for():
    frames = encode([Bound(1)], "sender")
    assert decode(frames, "receiver") == [("sender", "receiver")]
    assert current_codec() is None


class Nested:
    def __reduce__(self):
        return list, ((encode(Bound(0), "inner")[0], current_codec()),)


def test_context_is_restored_after_a_nested_encode_and_after_errors():
    inner, outer = trip(Nested(), "outer")
    assert outer == "outer"
    assert decode([inner], "x") == ("inner", "x")
    with pytest.raises(TypeError):
        encode(threading.Lock(), "failing")
    assert current_codec() is None


def test_two_threads_do_not_see_each_others_context():
    contexts = {}
    started = threading.Barrier(2)

    class Waiting:
        def __reduce__(self):
            started.wait(10)
            contexts[threading.current_thread().name] = current_codec()
            return int, ()

    threads = [threading.Thread(target=encode, args=(Waiting(), name), name=name) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert contexts == {"a": "a", "b": "b"}


def test_too_deep_recursion_is_a_pickling_error():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(pickle.PicklingError):
        encode(deep)
    while deep:  # take it apart by hand: freeing it recursively is slow
        deep = deep[0]


def test_neither_torch_nor_numpy_is_imported_by_the_wire():
    code = (
        "import sys, collections\n"
        "from monarch_nb.wire import encode, decode\n"
        "decode(encode([collections.OrderedDict(a=1), bytes(10**6)]))\n"
        "assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
