"""Port forwarding between processes of meshes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from monarch_nb.mesh import ProcMesh
from monarch_nb.runtime import Actor, Channel, Port, PortReceiver, current_runtime, endpoint
from monarch_nb.shape import Point
from monarch_nb.wire import ActorError

_HERE = "127.0.0.1"
_CHUNK = 1 << 16
_WINDOW = 64  # chunks on their way that the other side has not yet written
_CLOSE_S = 1.0

PortNumber = int | Callable[[Point], int]
Address = str | Callable[[Point], str]
# bytes: data, b"" for its end; a count: that many chunks were written; None: the connection was cut.
Message = bytes | int | None


class _Connection:
    """One end of a connection: copies data between the socket and the other end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: "Port[Message]",
        of: "PortReceiver[Message]",
    ) -> None:  # fmt: skip
        self._reader, self._writer, self._to, self._of = reader, writer, to, of
        self._window = asyncio.Semaphore(_WINDOW)
        self._input_ended = asyncio.Event()

    async def run(self) -> None:
        """Runs until both directions have ended, or one is cut."""
        cut = True
        inward = asyncio.create_task(self._inward())
        done = asyncio.create_task(self._done())
        try:
            first, _ = await asyncio.wait((inward, done), return_when=asyncio.FIRST_COMPLETED)
            for task in first:
                task.result()
            cut = False
        except (OSError, ActorError, RuntimeError):
            pass
        finally:
            for task in (inward, done):
                task.cancel()
            if cut:
                with contextlib.suppress(Exception):
                    self._to.send(None)
                self._writer.transport.abort()
            self._writer.close()  # all this before the first await, which may be cancelled
            await asyncio.gather(inward, done, return_exceptions=True)
            await closed(self._writer)

    async def _done(self) -> None:
        await self._outward()
        await self._input_ended.wait()

    async def _outward(self) -> None:
        while True:
            data = await self._reader.read(_CHUNK)
            await self._window.acquire()
            self._to.send(data)
            if not data:
                return

    async def _inward(self) -> None:
        """Never returns without an error: after the end of its data the other side may still report written chunks."""
        while True:
            message = await self._of.recv()
            if message is None:
                raise ConnectionAbortedError("the other end was cut")
            if isinstance(message, int):
                for _ in range(message):
                    self._window.release()
                continue
            if not message:
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                self._input_ended.set()
                continue
            self._writer.write(message)
            await self._writer.drain()
            self._to.send(1)


async def closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, and aborts it after a second."""
    writer.close()
    try:
        await asyncio.wait_for(writer.wait_closed(), _CLOSE_S)
    except (OSError, TimeoutError):
        writer.transport.abort()


class _Connections:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DestinationActor(Actor):
    """Connects to a port of its machine for each connection that the source has accepted."""

    def __init__(self) -> None:
        self._port = 0
        self._connections = _Connections()

    @endpoint
    async def aim(self, port: PortNumber) -> None:
        """Sets the port for new connections."""
        point = current_runtime().context().actor_instance.rank
        self._port = checked_port("dst_port", port(point) if callable(port) else port)

    @endpoint
    async def open(self, to: "Port[Message]") -> "Port[Message]":
        """Opens a connection; returns the port for data to it."""
        reader, writer = await asyncio.open_connection(_HERE, self._port)
        back, of = Channel[Message].open()
        self._connections.add(_Connection(reader, writer, quiet(to), of))
        return quiet(back)

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._connections.close()


class SourceActor(Actor):
    """Listens, and forwards each connection to the destination of the same rank."""

    def __init__(self) -> None:
        self._connections = _Connections()
        self._server: asyncio.Server | None = None
        self._destination: Any = None
        self._place = ("", "", 0)

    @endpoint
    async def place(self, address: Address) -> tuple[str, str, int]:
        """Sets and returns where it will listen: machine, address there, port."""
        point = current_runtime().context().actor_instance.rank
        self._place = (socket.gethostname(), *checked_address(address(point) if callable(address) else address))
        return self._place

    @endpoint
    async def check(self, firsts: frozenset[int]) -> None:
        """Raises OSError if another program listens, which `listen` would not notice. Only ranks in `firsts` check."""
        if current_runtime().context().message_rank.rank in firsts:
            server = await asyncio.start_server(self._accept, *self._place[1:], start_serving=False)
            server.close()

    @endpoint
    async def listen(self, destination: Any) -> None:
        """Accepts connections; ranks with the same address share them."""
        self._destination = destination.slice(**dict(current_runtime().context().message_rank))
        shared = hasattr(socket, "SO_REUSEPORT")
        self._server = await asyncio.start_server(self._accept, *self._place[1:], reuse_port=shared)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, of = Channel[Message].open()
        try:
            remote = (await self._destination.open.call(quiet(to))).values()[0]
        except Exception as error:  # no server: the client gets a connection error
            self.logger.warning("a forwarded connection could not be made: %s", error)
            writer.transport.abort()
            return
        self._connections.add(_Connection(reader, writer, remote, of))

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()
        await self._connections.close()


class PortForwarder(Actor):
    """Owns port forwards. Spawn one on `this_proc()`; when it stops, its forwards are closed."""

    @endpoint
    async def forward(
        self, dst_proc_mesh: ProcMesh, dst_port: PortNumber, src_proc_mesh: ProcMesh, src_address: Address
    ) -> None:
        """Makes each source process listen at `src_address`, for the destination process at the same place.

        Each connection there is forwarded to 127.0.0.1:`dst_port` at the destination, both directions, until both have
        ended. `dst_port` and `src_address` ("address:port") may be functions of the place; source processes of one
        machine with the same address share the connections there. Returns when all listen. Raises ValueError for meshes
        of different shapes, and ActorError for an invalid port or address, and where another program listens already:
        then none of them listens any more.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise ValueError(
                f"destination and source must have the same shape: {dst_proc_mesh.extent} != {src_proc_mesh.extent}"
            )
        if not callable(dst_port):
            checked_port("dst_port", dst_port)
        if not callable(src_address):
            checked_address(src_address)
        destination: Any = dst_proc_mesh.spawn("forward_destination", DestinationActor)
        source: Any = src_proc_mesh.spawn("forward_source", SourceActor)
        try:
            await destination.aim.call(dst_port)
            firsts: dict[tuple[str, str, int], int] = {}
            for rank, address in enumerate((await source.place.call(src_address)).values()):
                firsts.setdefault(address, rank)
            await source.check.call(frozenset(firsts.values()))
            await source.listen.call(destination)
        except BaseException:
            stops = [end.stop("the forward could not be made") for end in (source, destination)]
            for stop in stops:
                with contextlib.suppress(Exception):
                    await stop
            raise


def quiet(port: "Port[Message]") -> "Port[Message]":
    """Makes a port drop values silently once the connection is gone."""
    port.return_undeliverable = False
    return port


def checked_port(name: str, port: object) -> int:
    """Checks and returns a TCP port. Raises ValueError."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ValueError(f"{name} must be a whole number from 1 to 65535, not {port!r}")
    return port


def checked_address(address: object) -> tuple[str, int]:
    """Parses "address:port" into host and port. Raises ValueError."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"src_address must be a text such as '127.0.0.1:8080', not {address!r}")
    return host.removeprefix("[").removesuffix("]"), checked_port("src_address's port", int(port))
