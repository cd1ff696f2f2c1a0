"""The cold path: a proc as a fresh interpreter, by exec. Works everywhere, and for any interpreter and environment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import BinaryIO

from monarch_nb.host.bootstrap import command
from monarch_nb.host.leash import Leash


def start(leash: Leash, cord: int, environment: Mapping[str, str], *, python: str | None = None,
          bind: Mapping[str, str] | None = None, log: str = "") -> "subprocess.Popen[bytes]":  # fmt: skip
    """Start a proc in a session of its own. Blocks for the exec (milliseconds). Raises OSError."""
    out: int | BinaryIO = subprocess.DEVNULL
    if log:
        try:
            out = open(log, "ab", buffering=0)  # noqa: SIM115 - closed below
        except OSError:
            pass  # a full disk must not keep a proc from starting
    argv = binding_prefix(bind or {}) + command("monarch_nb.host.proc_main", leash.far_fd, cord, python=python)
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                   pass_fds=(leash.far_fd, cord), env=dict(environment))  # fmt: skip
    finally:
        if not isinstance(out, int):
            out.close()
    leash.handed_over()
    return process


def binding_prefix(bind: Mapping[str, str]) -> list[str]:
    """What to put before a command so that it runs on given processors and memory; nothing off Linux.

    Keys are numactl's (`cpunodebind`, `membind`, `physcpubind`) or `cpus`, for which taskset does where numactl lacks.
    """
    if not bind or sys.platform != "linux":
        return []
    unknown = set(bind) - {"cpunodebind", "membind", "physcpubind", "cpus"}
    if unknown:
        raise ValueError(f"unknown proc_bind keys {sorted(unknown)}; known are cpunodebind, membind, physcpubind, cpus")
    search = os.environ.get("PATH")
    options = [f"--{'physcpubind' if key == 'cpus' else key}={value}" for key, value in bind.items()]
    if shutil.which("numactl", path=search):
        return ["numactl", *options]
    if set(bind) <= {"cpus", "physcpubind"} and shutil.which("taskset", path=search):
        return ["taskset", "-c", next(iter(bind.values()))]
    return []
