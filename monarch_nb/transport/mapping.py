"""Mappings of memory files that keep no descriptor open, as Python's own do before 3.13 (each mapping dups one)."""

import ctypes
import mmap
import os
import sys

__all__ = ["map_file"]

_MAP_FIXED = 0x10  # Linux and macOS
_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, length: int, *, private: bool) -> memoryview:
    """The content of a file: writable and private to this mapping, or read-only and shared. Raises OSError."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    protection = mmap.PROT_READ | mmap.PROT_WRITE if private else mmap.PROT_READ
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, length, flags=flags, prot=protection, trackfd=False))
    # An anonymous mapping has no descriptor; the file is laid over it, and it goes when the mmap object goes.
    place = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(place))
    if _mmap()(start, length, protection, flags | _MAP_FIXED, fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    view = memoryview(place)
    return view if private else view.toreadonly()


def _mmap() -> "ctypes._FuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return function
