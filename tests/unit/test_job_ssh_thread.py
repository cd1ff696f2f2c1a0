"""The thread on which SSH connections live leaves nothing when it ends."""

import asyncio
import socket
import threading

import pytest

from monarch_nb.job.ssh.adapter import SSHLoop

pytestmark = pytest.mark.timeout(30)
UNREAD = b"x" * (64 << 20)  # more than two sockets take


@pytest.mark.parametrize("closes", [True, False], ids=["closing", "forgotten"])
def test_a_connection_whose_peer_does_not_read_ends_with_the_thread(closes: bool) -> None:
    loops = SSHLoop("test-loop")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "test-loop"]

    async def write() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(*door.getsockname())
        writer.write(UNREAD)
        if closes:
            writer.close()
        return writer

    with socket.create_server(("127.0.0.1", 0)) as door:
        writer = asyncio.run_coroutine_threadsafe(write(), loops.loop).result(10)
        with door.accept()[0]:
            loops.end()
            thread.join(20)
    assert not thread.is_alive()
    assert writer.get_extra_info("socket").fileno() == -1
