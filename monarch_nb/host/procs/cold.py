"""The cold path: a proc as a fresh interpreter, by exec. Works everywhere, and for any interpreter and environment."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from monarch_nb.host.bootstrap import command
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.environment import overlaid
from monarch_nb.host.procs.proc_main import DESCRIPTORS
from monarch_nb.host.protocol import Launch
from monarch_nb.logs.marks import ERR, OUT

_log = logging.getLogger(__name__)
_NUMACTL = frozenset({"cpunodebind", "membind", "physcpubind"})
_NODES = Path("/sys/devices/system/node")


def start(channel: ProcChannel, cord: int, environment: Mapping[str, str], *, python: str | None = None,
          bind: Mapping[str, str] | None = None, log: str = "",
          launch: Launch | None = None) -> "subprocess.Popen[bytes]":  # fmt: skip
    """Starts a proc in a session of its own, by a command of the user's if there is one.

    Blocks for the exec (milliseconds). Raises OSError, and ValueError for an invalid binding.
    """
    prefix = binding_prefix(bind or {})
    executable = None
    if launch is None:
        argv = prefix + command("monarch_nb.host.procs.proc_main", channel.far_fd, cord, python=python)
    else:
        argv = [*prefix, launch.program, *launch.args]
        if launch.arg0 is not None and not prefix:
            argv[0], executable = launch.arg0, launch.program
        environment = {**overlaid(environment, launch.env), DESCRIPTORS: f"{channel.far_fd} {cord}"}
    with contextlib.ExitStack() as files:
        out: int | BinaryIO = subprocess.DEVNULL
        err: int | BinaryIO = subprocess.DEVNULL
        if log:
            with contextlib.suppress(OSError):  # a full disk must not keep a proc from starting
                out = files.enter_context(open(log + OUT, "ab", buffering=0))
                err = files.enter_context(open(log + ERR, "ab", buffering=0))
        process = subprocess.Popen(argv, executable=executable, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True, pass_fds=(channel.far_fd, cord),
                                   env=dict(environment))  # fmt: skip
    channel.handed_over()
    return process


def binding_prefix(bind: Mapping[str, str]) -> list[str]:
    """Returns a command prefix that binds a command to processors and memory; nothing off Linux.

    Keys are numactl's (`cpunodebind`, `membind`, `physcpubind`), and `cpus`, which taskset takes where numactl lacks.
    """
    unknown = set(bind) - _NUMACTL - {"cpus"}
    if unknown:
        raise ValueError(f"unknown proc_bind keys {sorted(unknown)}; known are cpunodebind, membind, physcpubind, cpus")
    if not bind or sys.platform != "linux":
        return []
    search = os.environ.get("PATH")
    if shutil.which("numactl", path=search):
        options = {key: value for key, value in bind.items() if key in _NUMACTL} or {"physcpubind": bind["cpus"]}
        return ["numactl", *(f"--{key}={value}" for key, value in options.items())]
    cpus = bind.get("cpus") or bind.get("physcpubind") or _cpus_of_nodes(bind.get("cpunodebind", ""))
    ignored = [key for key in ("membind", "cpunodebind") if key in bind and (key == "membind" or not cpus)]
    if cpus and not shutil.which("taskset", path=search):
        ignored.append("cpus")
        cpus = ""
    if ignored:
        _log.warning("proc_bind: %s is ignored: numactl is not installed on this host", ", ".join(ignored))
    return ["taskset", "-c", cpus] if cpus else []


def _cpus_of_nodes(nodes: str) -> str:
    """Returns the processors of memory nodes such as "0,1", as a list for taskset; empty for anything but numbers."""
    try:
        return ",".join((_NODES / f"node{int(node)}" / "cpulist").read_text().strip() for node in nodes.split(","))
    except (OSError, ValueError):
        return ""
