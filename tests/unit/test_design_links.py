"""Connections: when they are made, the thread that reads them, and heartbeats without the GIL."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monarch_nb.transport import Node
from monarch_nb.transport.tcp.endpoints import Limits
from monarch_nb.wire.header import Header, Kind
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]

# Says where it listens; holds the GIL, from its first message on, for three seconds in one C call.
BUSY = """
import ctypes, sys, threading
from monarch_nb.transport import Node
from monarch_nb.wire.header import Header, Kind
arrival = threading.Event()
node = Node("h2/agent", run_folders={}, handler=lambda header, parcel: arrival.set(),
            on_link_failed=lambda *lost: None, tcp_bind="tcp://127.0.0.1:0", insecure_loopback=True)
node.start()
print(node.tcp_endpoint, flush=True)
arrival.wait()
print("holds", flush=True)
ctypes.PyDLL(None).usleep(3_000_000)
node.send(Header(Kind.CONTROL, "h1/agent", "h2/agent"), node.snapshot([b"back"]))
sys.stdin.read()
"""


def test_connections_are_made_when_they_are_needed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, run_folder() as folder:
        a, b = End("h1/agent", folder, insecure_loopback=True), End("h1/b", folder)
        with ends(a, b):
            a.node.learn("h2", f"tcp://127.0.0.1:{door.getsockname()[1]}")
            a.send("h1/b")
            b.get()  # it could have dialled by now
            door.setblocking(False)
            with pytest.raises(BlockingIOError):
                door.accept()
            door.settimeout(20)
            a.send("h2/agent")
            door.accept()[0].close()


def test_one_thread_reads_all_that_comes() -> None:
    threads: set[int] = set()
    arrivals = threading.Semaphore(0)

    def take(header: Header, parcel: object) -> None:
        threads.add(threading.get_ident())
        arrivals.release()

    with run_folder() as folder:
        node = Node(
            "h/agent", run_folders={"h": folder}, handler=take, on_link_failed=lambda *lost: None,
            tcp_bind="tcp://127.0.0.1:0", insecure_loopback=True,
        )  # fmt: skip
        node.start()
        local, remote = End("h/a", folder), End("far/agent", insecure_loopback=True)
        remote.node.learn("h", node.tcp_endpoint)
        with ends(local, remote):
            for lane in (0, 1):
                local.send("h/agent", b"p", b"x" * 1_000_000, lane=lane)
                remote.send("h/agent", b"p", b"x" * 1_000_000, lane=lane)
            for _ in range(4):
                assert arrivals.acquire(timeout=20)
            node.close(0.2)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_heartbeats_need_no_gil() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    try:
        limits = Limits(heartbeat_ms=50, heartbeat_timeout_ms=1000)
        a = End("h1/agent", insecure_loopback=True, limits=limits)
        a.node.learn("h2", child.stdout.readline().strip())
        with ends(a):
            a.send("h2/agent", kind=Kind.CONTROL)
            assert child.stdout.readline() == "holds\n"
            assert a.get()[1] == [b"back"]  # three times as late as would be forgiven without a sign of life
            while not a.connections.empty():
                assert a.connections.get()[1], "it was taken for dead"
    finally:
        child.kill()
        child.communicate()


def test_an_agent_loads_nothing_that_runs_users_code() -> None:
    source = (
        "import sys, monarch_nb.host.agent\n"
        "print([name for name in sys.modules if name.startswith(('monarch_nb.runtime', 'monarch_nb.mesh'))])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout == "[]\n", done.stderr
