import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_nb.transport import DescriptorLimitError, SharedMemoryError, pool
from monarch_nb.transport.parcel import snapshot
from monarch_nb.transport.shared import MemoryFile, available
from monarch_nb.wire import decode, encode
from monarch_nb.wire.header import Header, Kind
from tests.unit.transport_tools import End, ends, run_folder, starved

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not available(), reason="this system has no memory files")]
BIG = 1 << 20


def memory_files(pid: int | str = "self") -> list[str]:
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith("/memfd:monarch-nb"):
            paths.append(target)
    return paths


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_only_large_buffers_get_a_memory_file() -> None:
    parcel = snapshot([b"p", bytes(256 * 1024 - 1), bytes(256 * 1024), bytearray(BIG)])
    assert [type(body).__name__ for body in parcel.bodies] == ["bytes", "bytes", "MemoryFile", "MemoryFile"]
    assert parcel.nbytes == 1 + 2 * 256 * 1024 - 1 + BIG
    parcel.close()
    assert memory_files() == []


def test_small_buffers_share_a_memory_file_and_are_writable_each() -> None:
    state = [bytearray([number]) * 16_384 for number in range(200)]
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            parcel = a.node.snapshot(encode([pickle.PickleBuffer(part) for part in state]))
            assert [type(body).__name__ for body in parcel.bodies] == ["bytes", "MemoryFile"]
            state[3][:] = bytes(16_384)
            for _ in range(2):
                a.node.send(Header(Kind.CALL, "h/b", "h/a"), parcel)
            first, second = decode(b.get()[1]), decode(b.get()[1])
            first[5][:3] = b"new"
            assert [part[0] for part in second] == list(range(200))
            assert bytes(first[4]) + bytes(first[6]) == b"\4" * 16_384 + b"\6" * 16_384


def test_a_body_for_many_is_written_once_and_released_last(monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    plain = MemoryFile.append

    def counting(self: MemoryFile, piece: memoryview) -> None:
        nonlocal written
        written += piece.nbytes
        plain(self, piece)

    monkeypatch.setattr(MemoryFile, "append", counting)
    monkeypatch.setattr(pool, "LENT", 0.1)
    with run_folder() as folder:
        a = End("h/a", folder)
        receivers = [End(f"h/r{n}", folder, consume=False) for n in range(4)]
        with ends(a, *receivers):
            parcel = a.node.snapshot([b"p", b"\5" * BIG])
            for n in range(4):
                a.node.send(Header(Kind.CALL, f"h/r{n}", "h/a"), parcel)
            parcel.close()
            del parcel
            got = [receiver.inbox.get(timeout=20)[1] for receiver in receivers]
            views = [parcel.frames[1] for parcel in got]
            assert all(bytes(view) == b"\5" * BIG for view in views)
            assert written == BIG
            for receiver, parcel in zip(receivers, got, strict=True):
                receiver.node.consumed(parcel)
                parcel.close()
            del got, parcel
            assert soon(lambda: memory_files() == [])
            views[0][0] = 9  # a mapping outlives its descriptor, and is private
            assert bytes(views[1][:1]) == b"\5"


def test_sealed_memory_cannot_be_changed() -> None:
    file = MemoryFile.holding(memoryview(b"x" * BIG))
    with pytest.raises(PermissionError):
        os.pwrite(file.fd, b"y", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 0)
    private = file.private()
    private[0:1] = b"y"
    assert bytes(file.private()[0:1]) == b"x"


def test_without_memory_files_large_buffers_travel_in_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_NB_PORTABLE", "1")
    with run_folder() as folder:
        a, b, c = End("h/a", folder), End("h/b", folder), End("h/c", folder)
        with ends(a, b, c):
            data = bytearray(b"\1" * (3 * BIG))
            parcel = a.node.snapshot([b"p", data, b"s"])
            data[:] = bytes(len(data))
            for dst in ("h/b", "h/c"):
                a.node.send(Header(Kind.CALL, dst, "h/a"), parcel)
            for end in (b, c):
                _, frames = end.get()
                assert bytes(frames[1]) == b"\1" * (3 * BIG)
                frames[1][:] = bytes(3 * BIG)
            assert memory_files() == []


def test_memory_file_senders_and_receivers_without_them_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        monkeypatch.setenv("MONARCH_NB_PORTABLE", "1")
        b = End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"p", b"\1" * BIG)
            assert bytes(b.get()[1][1]) == b"\1" * BIG
            b.send("h/a", b"p", b"\2" * BIG)
            assert bytes(a.get()[1][1]) == b"\2" * BIG


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_without_memory_the_error_says_how_much_was_wanted(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(SharedMemoryError, match="no memory for a buffer of 5 MiB"):
        snapshot([b"p", bytes(5 << 20)])
    assert memory_files() == []


def test_without_descriptors_the_error_names_the_limit() -> None:
    with starved(leaving=0), pytest.raises(DescriptorLimitError, match="ulimit -n"):
        snapshot([b"p", bytes(BIG)])


def test_a_mapping_keeps_no_descriptor_open() -> None:
    parcels = [snapshot([b"p", bytes([n]) * BIG]) for n in range(5)]
    views = [parcel.frames[1] for parcel in parcels]
    for parcel in parcels:
        parcel.close()
    assert memory_files() == []
    assert [view[0] for view in views] == list(range(5))


CHILD = """
import sys, time
from pathlib import Path
from monarch_nb.transport import Node
from monarch_nb.wire import decode, encode
from monarch_nb.wire.header import Header, Kind
node = Node("h/a", run_folders={"h": Path(sys.argv[1])}, handler=print, on_link_failed=print)
node.start()
node.send(Header(Kind.CALL, "h/b", "h/a"), node.snapshot([b"p", bytes(20 << 20)]))
node.send(Header(Kind.CALL, "h/nobody", "h/a"), node.snapshot([b"p", bytes(20 << 20)]))
print("sent", flush=True)
time.sleep(60)
"""


def test_after_sigkill_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    shm = Path("/dev/shm")
    before = set(os.listdir(shm)) if shm.is_dir() else set()
    with run_folder() as folder:
        b = End("h/b", folder)
        with ends(b):
            environment = {**os.environ, "PYTHONPATH": os.getcwd()}
            child = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, env=environment)
            assert child.stdout is not None
            assert child.stdout.readline() == b"sent\n"
            _, frames = b.get()
            assert len(memory_files(child.pid)) >= 1
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            assert bytes(frames[1][:10]) == bytes(10)  # what arrived stays readable
        assert not any("monarch" in name for name in set(os.listdir(shm) if shm.is_dir() else ()) - before)
