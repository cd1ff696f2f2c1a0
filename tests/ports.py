"""Ports without listeners, and loopback addresses, which no other suite on this machine is given meanwhile."""

import atexit
import fcntl
import functools
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Below the ports that systems assign by themselves (from 32768, or 49152), which another test may get first.
_FIRST, _SIZE, _BLOCKS = 20_000, 500, 25
_FOLDER = Path(f"/tmp/monarch-nb-tests-{os.getuid()}")  # whatever TMPDIR a test sets


def claim(names: Iterable[str]) -> str:
    """The first of some names that no other living process has claimed; this one has it until it ends.

    A file holds its pid, so that no descriptor stays open for it. Raises OSError where all are taken.
    """
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(_FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for name in names:
            path = _FOLDER / name
            if not _is_claimed(path):
                path.write_text(str(os.getpid()))
                atexit.register(_release, path, os.getpid())
                return name
    finally:
        os.close(folder)
    raise OSError(f"other processes have claimed all: see {_FOLDER}")


def _is_claimed(path: Path) -> bool:
    try:
        os.kill(int(path.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):  # or now another user's process
        return False
    return True


def _release(path: Path, owner: int) -> None:
    if owner == os.getpid():  # not in a child that was forked
        path.unlink(missing_ok=True)


@functools.cache
def _ports(_pid: int) -> Iterator[int]:
    """Those of this process, again and again: a port that was free before may be so again."""
    first = int(claim(str(_FIRST + _SIZE * block) for block in range(_BLOCKS)))
    return itertools.cycle(range(first, first + _SIZE))


@functools.cache
def _addresses(_pid: int) -> Iterator[str]:
    network = claim(f"127.{second}.{third}" for second in range(8, 200) for third in range(256))
    return (f"{network}.{last}" for last in itertools.cycle(range(1, 255)))


def own_address() -> str:
    """An address of the loopback that no other suite is given, nor this one for its next 253."""
    return next(_addresses(os.getpid()))


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and that no other test requests."""
    for port in itertools.islice(_ports(os.getpid()), _SIZE):
        with socket.socket() as door:
            try:
                door.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among those of this process")


def free_ports(count: int) -> list[int]:
    """So many of them."""
    return [free_port() for _ in range(count)]


def kernel_ports() -> dict[str, Any]:
    """Options of a KernelManager, so that it picks no ports itself, which others may get until the kernel is up."""
    names = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    return {"cache_ports": False, **dict(zip(names, free_ports(len(names)), strict=True))}
