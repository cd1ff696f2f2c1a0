"""Strangers and broken peers at the TCP port of a host: the mesh keeps working, and agents unpickle nothing."""

import contextlib
import os
import pickle
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from monarch_nb import connect
from monarch_nb.connect import attach_hosts
from monarch_nb.host.folders import run_folder_for
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Keys
from tests.cluster.hosts_tools import SOON, HostProcess, Member, nothing_left
from tests.polling import until

pytestmark = pytest.mark.timeout(120)
__all__ = ["nothing_left"]

AUDIT = """
import os, sys
if any("monarch_nb.host.agent" in word for word in sys.orig_argv):
    import pickle, _pickle
    log = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    pid = os.getpid()
    def note(word):
        if os.getpid() == pid:
            os.write(log, f"{word}\\n".encode())
    sys.addaudithook(lambda event, arguments: note(event) if event == "pickle.find_class" else None)
    for module in (pickle, _pickle):
        for name in ("load", "loads"):
            setattr(module, name, lambda *a, _f=getattr(module, name), _n=name, **k: (note(_n), _f(*a, **k))[1])
    class Unpickler(_pickle.Unpickler):
        def __init__(self, *a, **k):
            note("Unpickler")
            super().__init__(*a, **k)
    pickle.Unpickler = _pickle.Unpickler = Unpickler
    pickle.loads(pickle.dumps(os.getpid))  # proves that the hooks report
    note("armed")
"""
ARMED = ["loads", "pickle.find_class", "armed"]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def keys(folder: Path) -> Keys:
    return Keys.load_or_create(folder / "job.key")


@pytest.fixture(scope="module")
def agent(folder: Path, keys: Keys) -> Iterator[HostProcess]:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(AUDIT)
    env = {"PYTHONPATH": str(folder / "site"), "AUDIT": str(folder / "audit")}
    process = HostProcess(folder, key=folder / "job.key", env=env)
    yield process
    connect.shutdown()
    process.close()


@pytest.fixture(scope="module")
def members(agent: HostProcess, folder: Path) -> Any:
    procs = attach_hosts([agent.endpoint], key=folder / "job.key").spawn_procs(per_host={"slots": 2}, name="target")
    members = procs.spawn("members", Member)
    members.where.call().get(SOON)
    return members


@pytest.fixture
def unharmed(members: Any, agent: HostProcess, folder: Path) -> Iterator[None]:
    """Checks that calls are answered, and that the agent unpickles nothing and leaks no descriptor."""
    before = descriptors(agent.pid)
    pids = members.where.call().get(SOON).values()
    over = threading.Event()
    answers: list[Any] = []

    def go_on() -> None:
        while not over.is_set() or len(answers) < 5:
            answers.append(members.where.call().get(SOON).values() == pids)

    caller = threading.Thread(target=go_on)
    caller.start()
    yield
    over.set()
    caller.join()
    assert all(answers)
    assert agent.process.poll() is None
    assert (folder / "audit").read_text().split() == ARMED
    assert not (folder / "bomb").exists()
    until(lambda: descriptors(agent.pid) <= before)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def messages(folder: Path, host: str) -> "list[list[bytes]]":
    """Messages that resemble ours, and noise."""
    bomb = pickle.dumps(Bomb(folder / "bomb"))
    generator = random.Random(3)
    noise = [[generator.randbytes(generator.randrange(300)) for _ in range(1 + number % 4)] for number in range(200)]
    prefixed = [[bytes(50) + bomb, bomb], [bomb], [bomb, bomb, bomb], [b"", bomb], [b"\xff" * 80, bomb]]
    return [*noise, *prefixed]


def dealer(context: "zmq.Context[Any]", agent: HostProcess, name: bytes, keys: Keys | None) -> "zmq.Socket[bytes]":
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.routing_id = name
    if keys is not None:
        peer.curve_serverkey = keys.public
        peer.curve_publickey, peer.curve_secretkey = keys.public, keys.secret
    peer.connect(agent.endpoint)
    return peer


@contextlib.contextmanager
def context() -> "Iterator[zmq.Context[Any]]":
    ctx: zmq.Context[Any] = zmq.Context()
    try:
        yield ctx
    finally:
        ctx.destroy(0)


@pytest.mark.parametrize("owner", ["none", pytest.param("other", marks=pytest.mark.slow)])
def test_strangers_who_speak_zeromq(unharmed: None, agent: HostProcess, folder: Path, owner: str) -> None:
    with context() as ctx:
        for name in (b"h0/c|0|1", b"x", f"{current_runtime().address}|1|ffffffffffffffff".encode()):
            with dealer(ctx, agent, name, Keys.create() if owner == "other" else None) as stranger:
                with contextlib.suppress(zmq.Again):  # refused already: no peer is left to send to
                    for message in messages(folder, agent.host):
                        stranger.send_multipart(message, zmq.NOBLOCK)
                assert stranger.poll(300) == 0


def test_port_scanners_and_garbage_do_no_harm(unharmed: None, agent: HostProcess) -> None:
    generator = random.Random(9)
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01CURVE" + bytes(15) + bytes(32)
    huge = [greeting + b"\x06" + (1 << 62).to_bytes(8, "big"), b"\xff" + b"\xff" * 8 + b"\x7f" + bytes(200)]
    for words in [b"GET / HTTP/1.1\r\n\r\n", b"", greeting[:30], greeting, *huge, b"\0" * 1_000_000,
                  *(generator.randbytes(generator.randrange(1, 2000)) for _ in range(60))]:  # fmt: skip
        with socket.create_connection(("127.0.0.1", agent.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)


def test_strangers_who_hang_on_do_not_keep_others_out(unharmed: None, agent: HostProcess, folder: Path) -> None:
    sockets = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(400)]
    try:
        for number, stranger in enumerate(sockets):
            with contextlib.suppress(OSError):
                stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f"[: number % 11])
        assert attach_hosts([agent.endpoint], key=folder / "job.key", timeout=SOON).initialized.get(SOON) is True
    finally:
        for stranger in sockets:
            stranger.close()


def test_peers_with_the_key_that_send_nonsense_do_no_harm(
    unharmed: None, agent: HostProcess, keys: Keys, folder: Path
) -> None:
    with context() as ctx:
        for name in (b"?", b"hbad/c|0|1", b"hbad/c|1|1", b"hbad/c|9|zz", b"|||"):
            with dealer(ctx, agent, name, keys) as mad:
                with contextlib.suppress(zmq.Again):
                    for message in messages(folder, agent.host):
                        mad.send_multipart(message, zmq.NOBLOCK)
                    mad.send(b"x" * 3_000_000, zmq.NOBLOCK)  # larger than any of our frames: cut off
                mad.poll(100)


def test_run_folders_are_private(members: Any, agent: HostProcess) -> None:
    for folder in (agent.run_folder, run_folder_for(current_runtime().host)):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_uid == os.getuid()
