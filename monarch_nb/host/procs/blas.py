"""Resizing numpy's OpenBLAS pool in a forked proc: it was loaded with its pool held back to one thread."""

import ctypes

_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
            "openblas_set_num_threads")  # fmt: skip


def set_openblas_threads(count: int) -> bool:
    """Let every OpenBLAS that is loaded use `count` threads. Returns whether there was one."""
    was_set = False
    for path in _loaded("openblas"):
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(count))
                was_set = True
                break
    return was_set


def _loaded(part: str) -> set[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 4 and "/" in line}
    except OSError:
        return set()
    return {path for path in paths if part in path.rpartition("/")[2]}
