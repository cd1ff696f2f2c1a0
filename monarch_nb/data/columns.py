"""One column of a record batch, as a NumPy array on the same memory where there is one, and as a list for texts."""

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

__all__ = ["ArrowError", "Column", "column_of"]

# https://arrow.apache.org/docs/format/CDataInterface.html#data-type-description-format-strings
_TYPES = {
    "c": "int8", "C": "uint8", "s": "int16", "S": "uint16", "i": "int32", "I": "uint32", "l": "int64", "L": "uint64",
    "e": "float16", "f": "float32", "g": "float64",
}  # fmt: skip
_TIMES = {"tdD": "int32", "tdm": "int64", "tts": "int32", "ttm": "int32", "ttu": "int64", "ttn": "int64"}
_TEXTS = ("u", "U", "vu")


class ArrowError(ValueError):
    """Record batches cannot be read, or have columns that no tensor is made of."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a schema says of a column."""

    name: str
    kind: str  # a format string of the C data interface
    child: "Column | None" = None


def column_of(column: Column, array: Any, keeper: object, offset: int, length: int) -> Any:
    """Rows `offset` to `offset + length` of an array of the C data interface, which is there while `keeper` is.

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
        flat = column_of(column.child, array.child(0), keeper, start * width, length * width)
        _no_nulls(column, array)
        return flat.reshape(length, width)
    if kind == "b":
        _no_nulls(column, array)
        return _bits(array.buffers[1], start, length)
    if kind.startswith("d:") and kind.count(",") == (2 if kind.endswith(",128") else 1):
        _no_nulls(column, array)
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
        _no_nulls(column, array)
    import numpy as np

    return np.where(_bits(array.buffers[0], start, length), values, np.array(np.nan, values.dtype))


def _values(address: int | None, dtype: str, start: int, length: int, keeper: object) -> Any:
    import numpy as np

    kind = np.dtype(dtype)
    if not length or not address:
        return np.empty(0, kind)
    memory: Any = (ctypes.c_ubyte * (length * kind.itemsize)).from_address(address + start * kind.itemsize)
    memory.keeper = keeper
    values = np.frombuffer(memory, kind)
    values.flags.writeable = False  # it is the source's own
    return values


def _decimals(scale: int, address: int | None, start: int, length: int) -> Any:
    """Numbers of 128 bits, in units of 10^-scale."""
    import numpy as np

    if not length or not address:
        return np.empty(0)
    halves = np.frombuffer(ctypes.string_at(address + 16 * start, 16 * length), np.uint64).reshape(length, 2).copy()
    high, low = halves[:, 1].view(np.int64), halves[:, 0].view(np.int64)
    units = np.where(high == low >> 63, low.astype(float), high * 2.0**64 + halves[:, 0])
    return units / 10.0**scale


def _bits(address: int | None, start: int, length: int) -> Any:
    import numpy as np

    if not length or not address:
        return np.empty(0, bool)
    first, last = start // 8, (start + length + 7) // 8
    packed = np.frombuffer(ctypes.string_at(address + first, last - first), np.uint8)
    return np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + length].astype(bool)


def _texts(kind: str, array: Any, start: int, length: int) -> list[str | None]:
    buffers = [array.buffers[number] for number in range(array.n_buffers)]
    there = _bits(buffers[0], start, length) if buffers[0] and array.null_count else None
    if kind == "vu":
        found = [_viewed(buffers, start + row) for row in range(length)]
    else:
        ends = _values(buffers[1], "int32" if kind == "u" else "int64", start, length + 1, None).tolist()
        found = [ctypes.string_at(buffers[2] + a, b - a) for a, b in itertools.pairwise(ends)]
    return [text.decode() if there is None or there[row] else None for row, text in enumerate(found)]


def _viewed(buffers: list[int], row: int) -> bytes:
    """A text of a view: 12 bytes at most lie in the view itself, others in one of the buffers after it."""
    view = buffers[1] + 16 * row
    size, _, number, offset = (ctypes.c_int32 * 4).from_address(view)
    return ctypes.string_at(view + 4 if size <= 12 else buffers[2 + number] + offset, size)


def _no_nulls(column: Column, array: Any) -> None:
    if array.null_count and array.buffers[0]:
        raise ArrowError(
            f"column {column.name} has missing values, and its type has nothing that stands for them: have the query "
            "fill them, or leave them out"
        )
