"""A port of this machine that leads through an SSH connection to a port of the machine at its other end."""

import asyncio
import contextlib
from collections.abc import Callable

import asyncssh

_AT_ONCE = 1 << 18  # bytes
_THERE = "127.0.0.1"


class Way:
    """Listens here for as long as it is wanted, also while the connection is cut: who dials it is hung up on then.

    So that a refusal is never one of this end. Used on one event loop alone.
    """

    def __init__(self, port: int, connection: Callable[[], "asyncssh.SSHClientConnection | None"]) -> None:
        """`port` is the one there; `connection` gives what leads there just now."""
        self.port = port
        self.here = 0  # the port of this machine, once it is open
        self._connection = connection
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens. Raises OSError."""
        self._server = await asyncio.start_server(self._dialled, "127.0.0.1", 0)
        self.here = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listens no more. What passes goes on until its connection ends."""
        if self._server is not None:
            self._server.close()

    async def knock(self) -> bool | None:
        """Whether somebody listens at the other end: False if that machine says that nobody does.

        None while nothing is known of it. Raises asyncssh.ChannelOpenError where that machine allows no such way.
        """
        connection = self._connection()
        if connection is None:
            return None
        try:
            _, writer = await connection.open_connection(_THERE, self.port)
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_CONNECT_FAILED and self._connection() is connection:
                return False
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise
            return None
        except (OSError, asyncssh.Error):
            return None
        writer.close()
        return True

    async def _dialled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connection()
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncssh.Error):
            if connection is None:
                return
            from_there, to_there = await connection.open_connection(_THERE, self.port)
            passing = {asyncio.create_task(_pass(reader, to_there)), asyncio.create_task(_pass(from_there, writer))}
            try:
                # Peers of ours close both directions at once: the end of one is the end of both.
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in passing:
                    task.cancel()
                await asyncio.gather(*passing, return_exceptions=True)
                to_there.close()


async def _pass(
    reader: "asyncio.StreamReader | asyncssh.SSHReader[bytes]",
    writer: "asyncio.StreamWriter | asyncssh.SSHWriter[bytes]",
) -> None:
    while data := await reader.read(_AT_ONCE):
        writer.write(data)
        await writer.drain()
