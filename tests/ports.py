"""Ports that nobody listens on, and that nobody is given meanwhile."""

import itertools
import os
import socket
from typing import Any

# Below those that systems hand out by themselves (from 32768, or 49152), where another test may get it first.
_FIRST, _EACH = 20_000, 500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = itertools.count(os.getpid())  # two suites at a time start at two places


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and asked for by no other test."""
    for number in itertools.islice(_next, _EACH):
        port = _FIRST + _WORKER * _EACH + number % _EACH
        with socket.socket() as door:
            try:
                door.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among the {_EACH} of {_WORKER}")


def free_ports(count: int) -> list[int]:
    """So many of them."""
    return [free_port() for _ in range(count)]


def kernel_ports() -> dict[str, Any]:
    """What a KernelManager is given, so that it picks none itself, which others may be given until the kernel is up."""
    names = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    return {"cache_ports": False, **dict(zip(names, free_ports(len(names)), strict=True))}
