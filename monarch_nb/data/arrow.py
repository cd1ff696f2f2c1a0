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


class _Schema(ctypes.Structure):
    pass


_Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_char_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Schema))),
    ("private_data", ctypes.c_void_p),
]


class _Array(ctypes.Structure):
    pass


_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Array))),
    ("private_data", ctypes.c_void_p),
]


class _Stream(ctypes.Structure):
    pass


_Stream._fields_ = [
    ("get_schema", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Schema))),
    ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Array))),
    ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(_Stream))),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Stream))),
    ("private_data", ctypes.c_void_p),
]


class _Held:
    """One record batch: its memory stays until the last array on it is gone."""

    def __init__(self, array: _Array) -> None:
        self.array = array

    def __del__(self) -> None:
        if self.array.release:
            self.array.release(ctypes.byref(self.array))


def batches_of_stream(source: Any) -> Iterator[dict[str, Any]]:
    """The record batches of an object with `__arrow_c_stream__`: columns by name, as `column_of` makes them.

    Blocks while the next one is made. Raises ArrowError for what cannot be fed, and where the source fails.
    """
    capsule = source.__arrow_c_stream__()  # it releases the stream when it goes
    stream = ctypes.cast(_get_pointer(capsule, b"arrow_array_stream"), ctypes.POINTER(_Stream))
    schema = _Schema()
    _check(stream, stream.contents.get_schema(stream, ctypes.byref(schema)))
    try:
        if schema.format != b"+s":
            raise ArrowError("this stream has values without columns: make a table of it, with a name for each column")
        fields = [schema.children[number].contents for number in range(schema.n_children)]
        columns = [_column(field) for field in fields]
    finally:
        schema.release(ctypes.byref(schema))
    while True:
        array = _Array()
        _check(stream, stream.contents.get_next(stream, ctypes.byref(array)))
        if not array.release:
            return
        held = _Held(array)
        yield {
            column.name: column_of(column, array.children[number].contents, held, array.offset, array.length)
            for number, column in enumerate(columns)
        }


def _column(field: _Schema) -> Column:
    child = _column(field.children[0].contents) if field.n_children == 1 else None
    kind = field.format.decode()
    if field.dictionary:
        kind = f"dictionary of {kind}"
    return Column((field.name or b"").decode(), kind, child)


def _check(stream: Any, code: int) -> None:
    if code:
        text = stream.contents.get_last_error(stream)
        raise ArrowError((text or b"").decode(errors="replace") or f"the source of the record batches failed ({code})")
