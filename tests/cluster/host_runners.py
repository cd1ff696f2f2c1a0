"""Runners of procs for tests of the host agent, in place of the runtime."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from monarch_nb.host.linux import thread_count
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.transport import Node, Parcel
from monarch_nb.wire import Header, Kind


def idle(spec: ProcSpec) -> int:
    threading.Event().wait()
    return 0


def facts(spec: ProcSpec) -> int:
    """Print one JSON line about this process, then idle."""
    torch = sys.modules.get("torch")
    print(json.dumps({
        "argv": sys.argv, "cwd": os.getcwd(), "fds": _fds(), "threads": thread_count(), "random": random.random(),
        "stdin": sys.stdin.read(), "sid": os.getsid(0), "pid": os.getpid(), "env": dict(os.environ),
        "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "hup": signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, "path0": sys.path[0],
        "main": vars(sys.modules["__main__"]).get("__spec__"),
        "torch_threads": torch.get_num_threads() if torch else None, "spec": spec.address,
    }))  # fmt: skip
    return idle(spec)


def _fds() -> list[str]:
    fds = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            fds.append(f"{fd}:{os.readlink(f'/proc/self/fd/{fd}').partition(':')[0]}")
        except OSError:
            pass
    return fds


def returns_three(spec: ProcSpec) -> int:
    print("leaving with three")
    return 3


def raises(spec: ProcSpec) -> int:
    raise RuntimeError("the runner is broken")


def talks(spec: ProcSpec) -> int:
    """Prints 30 lines, then nothing."""
    for number in range(30):
        print("line", number)
    ctypes.CDLL(None).puts(b"from C")
    return idle(spec)


def deaf(spec: ProcSpec) -> int:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf now")
    return idle(spec)


def with_child(spec: ProcSpec) -> int:
    """Has a subprocess in its own session's group, and prints its pid."""
    print("child", subprocess.Popen(["sleep", "1000"]).pid)
    return idle(spec)


def holds_gil(spec: ProcSpec) -> int:
    """Keeps the GIL for five seconds in one C call."""
    print("holding")
    ctypes.PyDLL(None).usleep(5_000_000)
    return idle(spec)


def interruptible(spec: ProcSpec) -> int:
    try:
        print("waiting")
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted")
        return 7
    return 0


def echoes(spec: ProcSpec) -> int:
    """Answers each call with its own address, rank and body; `big` with a megabyte, `mute` never, `die` by dying."""

    def handle(header: Header, parcel: Parcel) -> None:
        if header.kind == Kind.CALL:
            if header.method == "die" and header.rank == 1:
                os._exit(9)
            if header.port and header.method != "mute":
                body = bytes(parcel.frames[0]) if header.method != "big" else bytes(1 << 20)
                reply = Header(Kind.REPLY, header.src, spec.address, port=header.port, index=header.index, log=7)
                node.send(reply, Parcel([f"{header.rank}.{header.incarnation}.{header.seq}".encode(), body]))
            elif not header.port:
                print("told", header.src, header.method)
        node.consumed(parcel)

    node = Node(spec.address, run_folders={spec.host: Path(spec.run_folder)}, agent=spec.agent, handler=handle,
                on_link_failed=lambda *_: None)  # fmt: skip
    node.start()
    return idle(spec)


def floods(spec: ProcSpec) -> int:
    """Writes two megabytes, then exits with 5."""
    for _ in range(2000):
        print("x" * 1000)
    sys.exit(5)
