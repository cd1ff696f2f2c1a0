"""What procs write, and who sees it."""

import os
import resource
from pathlib import Path

import pytest

from monarch_nb.host import protocol
from monarch_nb.host.output import ForgivingFile
from tests.cluster.host_client import hosted

pytestmark = pytest.mark.timeout(60)


def test_output_of_python_and_of_c_is_streamed_in_order() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "talks")
        text = client.log(address, until="from C\n")
        assert text.splitlines() == [*(f"line {n}" for n in range(30)), "from C"]


def test_what_a_proc_wrote_last_arrives_though_it_is_dead() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "returns_three")
        client.exited(address)
        assert client.log(address, until="leaving with three\n")


def test_a_tail_can_begin_later() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "returns_three")
        client.exited(address)
        client.ask("agent.tail", protocol.Tail((address,), offset=8), protocol.Done)
        chunk = client.event("proc.log")
        assert (chunk.offset, chunk.data) == (8, b"with three\n")


@pytest.mark.parametrize("cold", [False, True])
def test_a_full_disk_does_not_harm_a_proc(cold: bool) -> None:
    with hosted(prewarm=not cold) as (handle, client):
        # The log file's place is taken by a device that is always full.
        logs = handle.run_folder / "logs"
        os.symlink("/dev/full", logs / "p0.0.0.log")
        [address] = client.spawn(1, "floods", bootstrap_env_cold=cold)
        assert client.exited(address)[0].exitcode == 5


def test_lost_output_is_counted_and_said_when_there_is_room_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    file = ForgivingFile(fd)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        written = file.write(b"0123456789abc")  # a short write first: the buffer above asks again
        assert file.write(b"0123456789abc"[written:]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(b"more\n")
    os.close(fd)
    said = (tmp_path / "log").read_bytes()
    assert said == b"0123456789[3 bytes of output were lost: File too large]\nmore\n"


def test_a_chunk_is_never_larger_than_a_chunk() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "floods")
        client.exited(address)
        client.ask("agent.tail", protocol.Tail((address,)), protocol.Done)
        data = b""
        while len(data) < 2000 * 1001:
            chunk = client.event("proc.log")
            assert chunk.offset == len(data)
            assert len(chunk.data) <= 64 * 1024
            data += chunk.data
        assert data == (b"x" * 1000 + b"\n") * 2000
