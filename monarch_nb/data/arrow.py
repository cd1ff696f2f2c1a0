"""Reads record batches through the Arrow PyCapsule interface as NumPy arrays without copies.

The structs are those of the Arrow C data and C stream interfaces (arrow.apache.org/docs/format/CDataInterface.html and
CStreamInterface.html). No Arrow library is needed.
"""

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
# https://arrow.apache.org/docs/format/CDataInterface.html#data-type-description-format-strings
_TYPES = {
    "c": "int8",
    "C": "uint8",
    "s": "int16",
    "S": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
    "e": "float16",
    "f": "float32",
    "g": "float64",
}
_TIMES = {"tdD": "int32", "tdm": "int64", "tts": "int32", "ttm": "int32", "ttu": "int64", "ttn": "int64"}
_TEXTS = ("u", "U", "vu")
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


class _ArrowStream(ctypes.Structure):
    _fields_ = (
        ("get_schema", _Fill),
        ("get_next", _Fill),
        ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    )


class _OwnedArray:
    """Owns an Arrow array: releases it with the last NumPy array on its memory."""

    def __init__(self, array: _Array) -> None:
        self.array = array

    def __del__(self) -> None:
        if self.array.release:
            self.array.release(ctypes.addressof(self.array))


class ArrowError(ValueError):
    """Record batches cannot be read, or have columns that cannot become tensors."""


@dataclass(frozen=True, slots=True)
class Column:
    """The schema of a column."""

    name: str
    kind: str  # a format string of the C data interface
    child: "Column | None" = None


def _column_of(column: Column, array: Any, keeper: object, offset: int, length: int) -> Any:
    """Returns rows `offset` to `offset + length` of an array of the C data interface, kept alive by `keeper`.

    Numbers, times and dates (as the integers that Arrow keeps) and fixed-size lists of them are arrays on the same
    memory; booleans are copied; decimals become float64, the nearest; texts are a list. A missing number is NaN where
    its type has one.
    """
    start = array.offset + offset
    kind = column.kind
    if kind in _TEXTS:
        return _texts(kind, array, start, length)
    if kind.startswith("+w:") and column.child is not None:
        width = int(kind[3:])
        flat = _column_of(column.child, array.child(0), keeper, start * width, length * width)
        _no_nulls(column, array, start, length)
        return flat.reshape(length, width)
    if kind == "b":
        _no_nulls(column, array, start, length)
        return _bits(array.buffers[1], start, length)
    if kind.startswith("d:") and kind.count(",") == (2 if kind.endswith(",128") else 1):
        _no_nulls(column, array, start, length)
        return _decimals(int(kind[2:].split(",")[1]), array.buffers[1], start, length)
    dtype = _TYPES.get(kind) or _TIMES.get(kind) or ("int64" if kind[:2] in ("ts", "tD") else None)
    if dtype is None:
        raise ArrowError(
            f"column {column.name} is of Arrow type {kind!r}, and no tensor is made of that: have the query cast it, or"
            " leave it out"
        )
    values = _values(array.buffers[1], dtype, start, length, keeper)
    if not array.null_count or not array.buffers[0]:
        return values
    if not dtype.startswith("float"):
        _no_nulls(column, array, start, length)
        return values
    return np.where(_bits(array.buffers[0], start, length), values, np.array(np.nan, values.dtype))


def _values(address: int | None, dtype: str, start: int, length: int, keeper: object) -> NDArray[np.generic]:
    kind = np.dtype(dtype)
    if not length or not address:
        return np.empty(0, kind)
    memory: Any = (ctypes.c_ubyte * (length * kind.itemsize)).from_address(address + start * kind.itemsize)
    memory.keeper = keeper
    values = np.frombuffer(memory, kind)
    values.flags.writeable = False  # the source owns the memory
    return values


def _decimals(scale: int, address: int | None, start: int, length: int) -> NDArray[np.float64]:
    """Returns numbers of 128 bits, in units of 10^-scale, as floats."""
    if not length or not address:
        return np.empty(0)
    halves = np.frombuffer(ctypes.string_at(address + 16 * start, 16 * length), np.uint64).reshape(length, 2).copy()
    high, low = halves[:, 1].view(np.int64), halves[:, 0].view(np.int64)
    units = np.where(high == low >> 63, low.astype(float), high * 2.0**64 + halves[:, 0])
    return units / 10.0**scale


def _bits(address: int | None, start: int, length: int) -> NDArray[np.bool_]:
    if not length or not address:
        return np.empty(0, bool)
    first, last = start // 8, (start + length + 7) // 8
    packed = np.frombuffer(ctypes.string_at(address + first, last - first), np.uint8)
    return np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + length].astype(bool)


def _texts(kind: str, array: Any, start: int, length: int) -> list[str | None]:
    buffers = [array.buffers[number] for number in range(array.n_buffers)]
    valid = _bits(buffers[0], start, length) if buffers[0] and array.null_count else None
    if kind == "vu":
        values = [_view_text(buffers, start + row) for row in range(length)]
    else:
        ends = _values(buffers[1], "int32" if kind == "u" else "int64", start, length + 1, None).tolist()
        values = [ctypes.string_at(buffers[2] + a, b - a) for a, b in itertools.pairwise(ends)]
    return [text.decode() if valid is None or valid[row] else None for row, text in enumerate(values)]


def _view_text(buffers: list[int], row: int) -> bytes:
    """Returns a text by its view, which contains up to 12 bytes itself; longer texts are in a later buffer."""
    view = buffers[1] + 16 * row
    size, _, number, offset = (ctypes.c_int32 * 4).from_address(view)
    return ctypes.string_at(view + 4 if size <= 12 else buffers[2 + number] + offset, size)


def _no_nulls(column: Column, array: Any, start: int, length: int) -> None:
    """Raises ArrowError for missing values among some rows; the count of an array may be unknown (-1), or of more."""
    if array.null_count and array.buffers[0] and not _bits(array.buffers[0], start, length).all():
        raise ArrowError(
            f"column {column.name} has missing values, and its type has nothing that stands for them: have the query "
            "fill them, or leave them out"
        )


def batches_of_stream(source: Any) -> Iterator[dict[str, Any]]:
    """Yields the record batches of an object with `__arrow_c_stream__`: columns by name, as `_column_of` returns them.

    Blocks until the next batch is ready. Raises ArrowError for batches that cannot be fed, and where the source fails.
    """
    capsule = source.__arrow_c_stream__()  # releases the stream when it is collected
    address = _get_pointer(capsule, b"arrow_array_stream")
    stream = _ArrowStream.from_address(address)
    schema = _Schema()
    _check(stream, stream.get_schema(address, ctypes.addressof(schema)))
    try:
        if schema.format != b"+s":
            raise ArrowError("this stream has values without columns: make a table of it, with a name for each column")
        columns = [_column(schema.child(number)) for number in range(schema.n_children)]
        names = [column.name for column in columns]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ArrowError(f"there are several columns {twice[0]}: give each its own name in the query")
    finally:
        schema.release(ctypes.addressof(schema))
    while True:
        array = _Array()
        _check(stream, stream.get_next(address, ctypes.addressof(array)))
        if not array.release:
            return
        batch = _OwnedArray(array)
        yield {
            column.name: _column_of(column, array.child(number), batch, array.offset, array.length)
            for number, column in enumerate(columns)
        }


def _column(field: _Schema, parent: str = "") -> Column:
    name = parent or (field.name or b"").decode()
    child = _column(field.child(0), name) if field.n_children == 1 else None
    kind = field.format.decode()
    if field.dictionary:
        kind = f"dictionary of {kind}"
    return Column(name, kind, child)


def _check(stream: _ArrowStream, code: int) -> None:
    if code:
        text = stream.get_last_error(ctypes.addressof(stream))
        raise ArrowError((text or b"").decode(errors="replace") or f"the source of the record batches failed ({code})")
