"""Mappings of memory files that keep no descriptor open, as Python's own do before 3.13 (each mapping dups one)."""

import ctypes
import functools
import mmap
import os
import sys

__all__ = ["map_file"]

_MAP_FIXED = 0x10  # Linux and macOS
_FAILED = ctypes.c_void_p(-1).value


class _Mapping(mmap.mmap):
    """A mapping that may be on loan: it holds the loan for as long as anybody holds a part of it."""

    loan: object = None


def map_file(fd: int, length: int, *, private: bool, writable: bool = False, loan: object = None) -> memoryview:
    """The content of a file: writable and private to this mapping, or shared and read-only. Raises OSError.

    `writable` makes a shared one writable: what is written there others see. The mapping keeps `loan` alive.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    writable = writable or private
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if sys.version_info >= (3, 13):
        mapped = _Mapping(fd, length, flags=flags, prot=protection, trackfd=False)
        mapped.loan = loan
        return memoryview(mapped)
    # An anonymous mapping has no descriptor; the file is laid over it, and it goes when the mmap object goes.
    place = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place.loan = loan
    start = ctypes.addressof(ctypes.c_char.from_buffer(place))
    if _mmap()(start, length, protection, flags | _MAP_FIXED, fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    view = memoryview(place)
    return view if writable else view.toreadonly()


@functools.cache
def _mmap() -> "ctypes._FuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return function
