"""`monarch._src.actor.pickle`: objects taken out of a pickle, and others put in their places."""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer, FrozenBuffer
from monarch._src.actor.pickle import _Pickler, flatten, maybe_torch, torch_dump, torch_loads, unflatten

pytestmark = pytest.mark.timeout(60)


@dataclass
class Handle:
    name: str


def is_handle(obj: Any) -> bool:
    return isinstance(obj, Handle)


def test_values_picked_by_a_filter_are_left_out_and_replaced() -> None:
    one, two = Handle("one"), Handle("two")
    saved, buffer = flatten({"a": one, "b": [two, 3], "c": one}, is_handle)
    assert saved == [one, two, one]
    assert b"one" not in buffer.freeze().read()
    _, buffer = flatten({"a": one, "b": [two, 3], "c": one}, is_handle)
    value = unflatten(buffer.freeze(), ["x", "y", "z"])
    assert value == {"a": "x", "b": ["y", 3], "c": "z"}


def test_bytes_work_like_a_buffer_and_values_may_come_lazily() -> None:
    saved, buffer = flatten([Handle("one"), (1, 2)], is_handle)
    assert unflatten(buffer.freeze().read(), iter(saved)) == [Handle("one"), (1, 2)]


def test_too_few_values_are_an_error() -> None:
    _, buffer = flatten([Handle("one"), Handle("two")], is_handle)
    with pytest.raises((StopIteration, pickle.UnpicklingError)):
        unflatten(buffer.freeze(), [1])


def test_functions_travel_by_value() -> None:
    base = 4
    _, buffer = flatten(lambda more: base + more, is_handle)
    copied = unflatten(buffer.freeze(), ())
    assert (copied(3), copied.__code__.co_filename) == (7, __file__)


def test_a_buffer_is_read_once_it_is_frozen() -> None:
    buffer = Buffer()
    assert buffer.write(b"ab") + buffer.write(memoryview(b"cde")) == len(buffer) == 5
    frozen = buffer.freeze()
    assert isinstance(frozen, FrozenBuffer)
    assert (len(frozen), frozen.read(2), frozen.read()) == (5, b"ab", b"cde")
    assert len(buffer) == 0


def test_a_buffer_keeps_a_copy_of_any_memory_without_gaps() -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.ones(1024)
    buffer = Buffer()
    assert buffer.write(pickle.PickleBuffer(data)) == 8192
    assert buffer.write(numpy.zeros((0, 3))) == 0
    data[0] = 2.0
    assert buffer.freeze().read() == numpy.ones(1024).tobytes()
    with pytest.raises(BufferError, match="buffer is not C-contiguous"):
        buffer.write(numpy.arange(16).reshape(4, 4).T)
    for array in (numpy.zeros(65536, dtype=numpy.uint8), numpy.arange(256).reshape(16, 16).T):
        saved, buffer = flatten(array, lambda obj: False)
        numpy.testing.assert_array_equal(unflatten(buffer.freeze(), saved), array)


def test_a_program_may_write_pickles_of_its_own_kind() -> None:
    class Pickler(_Pickler):
        pass

    Pickler._dispatch_table[Handle] = lambda handle: (str.upper, (handle.name,))
    try:
        sink = io.BytesIO()
        Pickler(lambda obj: False, sink).dump([Handle("x")])
        assert pickle.loads(sink.getvalue()) == ["X"]
    finally:
        del Pickler._dispatch_table[Handle]


def test_tensors_travel_by_value_unless_their_storages_are_left_out() -> None:
    torch = pytest.importorskip("torch")
    assert maybe_torch() is torch
    tensor = torch.arange(6.0)
    saved, buffer = flatten({"whole": tensor, "part": tensor[2:4]}, is_handle)
    assert saved == []
    copies = unflatten(buffer.freeze(), ())
    assert (copies["whole"].tolist(), copies["part"].tolist()) == (tensor.tolist(), [2.0, 3.0])
    assert copies["whole"].data_ptr() != tensor.data_ptr()

    kinds = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
    saved, buffer = flatten({"whole": tensor}, lambda obj: isinstance(obj, kinds))
    assert len(saved) == 1
    copies = unflatten(buffer.freeze(), saved)
    assert copies["whole"].data_ptr() == tensor.data_ptr()


def test_torch_dump_and_torch_loads_are_each_others_inverse() -> None:
    torch = pytest.importorskip("torch")
    sink = io.BytesIO()
    torch_dump({"a": torch.ones(2), "b": [1]}, sink)
    value = torch_loads(sink.getvalue())
    assert value["a"].tolist() == [1.0, 1.0]
    assert value["b"] == [1]
