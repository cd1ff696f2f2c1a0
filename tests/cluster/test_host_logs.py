"""What procs write, and who sees it."""

import io
import os
import resource
from pathlib import Path

import pytest

from monarch_nb.host import protocol
from monarch_nb.logs.forgiving import ForgivingText
from monarch_nb.logs.marks import ERR, OUT, TEXT
from monarch_nb.logs.tail import WINDOW
from tests.cluster.host_client import hosted

pytestmark = pytest.mark.timeout(120)


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
        client.log(address, until="leaving with three\n")
        client.ask("agent.tail", protocol.Tail((address,), offset=8), protocol.Done)
        chunk = client.event("proc.log", lambda chunk: chunk.blocks)
        assert (chunk.offset, chunk.data) == (8, b"with three\n")


@pytest.mark.parametrize("cold", [False, True])
def test_a_full_disk_does_not_harm_a_proc(cold: bool) -> None:
    with hosted(prewarm=not cold) as (handle, client):
        # The place of its spool is taken by a device that is always full.
        for kind in (TEXT, OUT, ERR):
            os.symlink("/dev/full", handle.run_folder / "spool" / f"p0.0.0{kind}")
        [address] = client.spawn(1, "floods", bootstrap_env_cold=cold)
        assert client.exited(address)[0].exitcode == 5


def test_lost_output_is_said_when_there_is_room_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "log", "wb", buffering=0) as raw:
        text = ForgivingText(io.BufferedWriter(raw, 16), "utf-8", line_buffering=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            for _ in range(20):
                print("some output", file=text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print("more", file=text)
        text.detach().detach()  # type: ignore[attr-defined]
    said = (tmp_path / "log").read_text()
    assert said.startswith("some outpu")
    assert said.endswith("[output was lost here: File too large]\nmore\n")


def test_a_chunk_is_never_larger_than_a_chunk() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "floods")
        client.ask("agent.tail", protocol.Tail((address,)), protocol.Done)
        data = b""
        while len(data) < 2000 * 1001:
            chunk = client.event("proc.log")
            assert chunk.offset == len(data)
            assert len(chunk.data) <= 2 * 64 * 1024
            data += chunk.data
        assert data == (b"x" * 1000 + b"\n") * 2000


def test_who_does_not_take_output_gets_a_window_of_it_and_then_the_number_of_lines_that_were_missed() -> None:
    with hosted() as (_, client):
        client.takes_output = False
        [address] = client.spawn(1, "floods")
        client.ask("agent.tail", protocol.Tail((address,)), protocol.Done)
        chunks = [client.event("proc.log")]
        while not chunks[-1].ended:  # the agent goes on without its subscriber
            chunks.append(client.event("proc.log", timeout=30))
        got = sum(chunk.data.count(b"\n") for chunk in chunks)
        assert got * 1001 < WINDOW + 4 * 64 * 1024
        assert got + sum(chunk.skipped for chunk in chunks) == 2000
        [started] = client.started(address)
        assert Path(started.log).read_text() == ("x" * 1000 + "\n") * 2000
