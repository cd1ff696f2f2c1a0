"""Links are cut, and peers on them talk nonsense: a live mesh goes on working, nothing is lost or done twice."""

import os
import random
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from monarch_nb.host.folders import run_folder_for
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Node, Parcel
from monarch_nb.wire import Header, Kind, Run
from monarch_nb.wire.header import CastPlan
from tests.cluster.fault_tools import SOON, begun, still_works

pytestmark = pytest.mark.timeout(120)

VERBS = ("reply", "proc.exited", "proc.stop?", "actor.failed", "actor.stop", "mesh.update", "agent.spawn", "agent.stop",
         "agent.tail", "call.blocked", "no such thing")  # fmt: skip


def folder() -> Path:
    return Path(run_folder_for(current_runtime().host))


def listeners(workers: Any) -> list[str]:
    """Socket paths of the controller, the agent and two processes."""
    procs = workers._state.procs
    names = [current_runtime().address, f"{current_runtime().host}/agent", procs.address(0), procs.address(1)]
    return [str(folder() / name.partition("/")[2]) for name in names]


def cut(path: str) -> int:
    """Shuts down this process's connections with the listener there; returns their number."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_UNIX and path in (connection.getpeername(), connection.getsockname()):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:
            continue
    return count


@pytest.mark.parametrize("listener", [0, 1, 2])
def test_a_link_is_cut_again_and_again(workers: Any, listener: int) -> None:
    path = listeners(workers)[listener]  # inbound, to the agent, to a process
    cuts = 0
    for number in range(60):
        workers.note.broadcast(number)
        if number % 12 == 6:
            cuts += cut(path)
        if number % 20 == 11:
            call = workers.echo.call(number)
            cuts += cut(path)
            assert call.get(SOON).values() == [number, number]
    assert cuts
    assert workers.noted.call().get(SOON).values() == [list(range(60))] * 2


def test_bytes_that_are_no_messages(workers: Any, host: Any) -> None:
    chance = random.Random(7)
    connections = []
    for path in listeners(workers):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(60)
        for begin in (b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), greeting):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            connection.sendall(begin)
            connections.append(connection)  # and then sends nothing more
    assert workers.rank.call().get(SOON).values() == [0, 1]
    for connection in connections:
        connection.close()
    still_works(host)


def test_messages_that_make_no_sense(workers: Any, host: Any) -> None:
    chance = random.Random(8)
    context: zmq.Context[Any] = zmq.Context()
    try:
        for path in listeners(workers):
            for name in (b"nobody", b"hx/c|0|1", b"hx/c|1|zz", b"hx/c|-1|2", b"\0x|0|5", b"h|y/z|0|9"):
                peer = context.socket(zmq.DEALER)
                peer.setsockopt(zmq.LINGER, 500)
                peer.setsockopt(zmq.ROUTING_ID, name) if not name.startswith(b"\0") else None
                peer.connect(f"ipc://{path}")
                for size in (0, 1, 47, 48, 49, 300):
                    peer.send(chance.randbytes(size))
                    peer.send_multipart([bytes([chance.randrange(8), 0]) + chance.randbytes(size), b"x" * size, b""])
                peer.close()
        assert workers.rank.call().get(SOON).values() == [0, 1]
    finally:
        context.destroy()
    still_works(host)


def test_a_peer_that_speaks_the_language_and_means_ill(workers: Any, host: Any) -> None:
    state = workers._state
    targets = [current_runtime().address, f"{current_runtime().host}/agent", state.procs.address(0)]
    deaf: Any = lambda *_: None  # noqa: E731
    evil = Node("hevil/c", run_folders={current_runtime().host: folder()}, handler=deaf, on_link_failed=deaf)
    evil.start()
    try:
        junk = [Parcel(), Parcel([b""]), Parcel([b"\xc1\xff"]), Parcel([b"cos\nsystem\n(S'exit 1'\ntR."]),
                Parcel([msgspec.msgpack.encode({"a": 1})])]  # fmt: skip
        for dst in targets:
            for parcel in junk:
                for verb in VERBS:
                    evil.send(Header(Kind.CONTROL, dst, evil.address, method=verb, port=3), parcel, lane=1)
                wrong = Header(Kind.CALL, dst, evil.address, state.uid, 0, sender="s", method="pid", port=1, index=99)
                for kind in (Kind.CALL, Kind.REPLY, Kind.PORT, Kind.FOLDED, Kind.RETURNED):
                    for seq in (-1, 0, 5):
                        evil.send(msgspec.structs.replace(wrong, kind=kind, seq=seq, status=77, call="x"), parcel)
                runs, names = (Run(0, 4000), Run(-7, 2)), (current_runtime().host, "hnone")
                plan = CastPlan(state.procs.uid, 2, runs, hosts=(0, 9), names=names)
                evil.send(msgspec.structs.replace(wrong, kind=Kind.CAST, plan=plan), parcel)
        evil.close(2)
    finally:
        evil.close(0)
    assert workers.slice(gpus=1).rank.call_one().get(SOON) == 0
    assert workers.echo.call(2).get(SOON).values() == [2, 2]
    still_works(host)


def test_one_message_may_come_more_than_once(workers: Any) -> None:
    from monarch_nb.actor import Channel

    port, receiver = Channel.open()
    call = workers.nap.call(0.2, port)
    begun(receiver, 2)
    cut(listeners(workers)[2])
    assert call.get(SOON).values() == ["slept", "slept"]
