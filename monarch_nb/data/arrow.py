"""Record batches of whatever has the Arrow PyCapsule interface, as NumPy arrays on the same memory.

The structs are those of the Arrow C data and C stream interfaces (arrow.apache.org/docs/format/CDataInterface.html and
CStreamInterface.html). No Arrow library is needed.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

from monarch_nb.data.columns import ArrowError, Column, column_of

__all__ = ["ArrowError", "batches_of_stream"]

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Fill = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Schema(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_char_p),
        ("flags", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    )

    def child(self, number: int) -> "_Schema":
        return _Schema.from_address(self.children[number])


class _Array(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    )

    def child(self, number: int) -> "_Array":
        return _Array.from_address(self.children[number])


class _Stream(ctypes.Structure):
    _fields_ = (
        ("get_schema", _Fill),
        ("get_next", _Fill),
        ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    )


class _Held:
    """One record batch: its memory stays until the last array on it is gone."""

    def __init__(self, array: _Array) -> None:
        self.array = array

    def __del__(self) -> None:
        if self.array.release:
            self.array.release(ctypes.addressof(self.array))


def batches_of_stream(source: Any) -> Iterator[dict[str, Any]]:
    """The record batches of an object with `__arrow_c_stream__`: columns by name, as `column_of` makes them.

    Blocks while the next one is made. Raises ArrowError for what cannot be fed, and where the source fails.
    """
    capsule = source.__arrow_c_stream__()  # it releases the stream when it goes
    address = _get_pointer(capsule, b"arrow_array_stream")
    stream = _Stream.from_address(address)
    schema = _Schema()
    _check(stream, stream.get_schema(address, ctypes.addressof(schema)))
    try:
        if schema.format != b"+s":
            raise ArrowError("this stream has values without columns: make a table of it, with a name for each column")
        columns = [_column(schema.child(number)) for number in range(schema.n_children)]
    finally:
        schema.release(ctypes.addressof(schema))
    while True:
        array = _Array()
        _check(stream, stream.get_next(address, ctypes.addressof(array)))
        if not array.release:
            return
        held = _Held(array)
        yield {
            column.name: column_of(column, array.child(number), held, array.offset, array.length)
            for number, column in enumerate(columns)
        }


def _column(field: _Schema) -> Column:
    child = _column(field.child(0)) if field.n_children == 1 else None
    kind = field.format.decode()
    if field.dictionary:
        kind = f"dictionary of {kind}"
    return Column((field.name or b"").decode(), kind, child)


def _check(stream: _Stream, code: int) -> None:
    if code:
        text = stream.get_last_error(ctypes.addressof(stream))
        raise ArrowError((text or b"").decode(errors="replace") or f"the source of the record batches failed ({code})")
