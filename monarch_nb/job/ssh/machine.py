"""One machine at the other end of an SSH connection, with a helper that runs there."""

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

import asyncssh
import msgspec

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.helper import HELLO, Answer, Ask
from monarch_nb.job.ssh.advice import advice, meant, words
from monarch_nb.job.ssh.places import read_machine
from monarch_nb.job.ssh.standing import Standing
from monarch_nb.job.ssh.way import Way
from monarch_nb.wire import json_decoder

_CONNECT_S = 20.0
_AGAIN_S = 5.0  # the same, until it answers at all, of one that did before: it may be back a moment later
_HELLO_S = 60.0  # for an interpreter on a slow file system
_ANSWER_S = 120.0
_BEAT_S, _BEATS = 5.0, 3  # a connection on which nothing is heard for so long is given up
_FOR_ASYNCSSH = ("username", "client_keys", "known_hosts", "config", "tunnel")
_LINES = 5


class Machine:
    """Connected when it is first asked, and again when the connection was lost. Used on one event loop alone.

    While ways lead through it a connection that was lost is had again without being asked for.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.jobs: set[str] = set()  # that this process has there
        self.busy = 0  # requests on their way
        self.address = ""  # the one that SSH dialled, a number; "" where a jump host did
        self._options = options
        self._one = asyncio.Lock()
        self._client: _Client | None = None  # of the connection that stands, or is being made
        self._connection: asyncssh.SSHClientConnection | None = None
        self._helper: asyncssh.SSHClientProcess[bytes] | None = None
        self._standing = Standing()
        self._cut = asyncio.Event()
        self._ways: dict[int, Way] = {}  # by the ports there
        self._keeper: asyncio.Task[None] | None = None

    async def ask(self, request: Ask) -> Answer:
        """What the helper answers. Raises EngineError."""
        async with self._one:
            for attempt in (0, 1):
                fresh = self._helper is None
                helper = self._helper or await self._begin()
                try:
                    helper.stdin.write(msgspec.json.encode(request) + b"\n")
                    line = await asyncio.wait_for(helper.stdout.readline(), _ANSWER_S)
                    if not line:
                        raise ConnectionError("the connection was closed")
                    answer = json_decoder(Answer).decode(line)
                except (OSError, asyncssh.Error, TimeoutError, msgspec.MsgspecError) as error:
                    self._dismiss()
                    if fresh or attempt or request.do == "start":
                        raise EngineError(f"{self.name} has not answered: {words(error)}") from error
                    continue  # it was lost some time ago
                if answer.error:
                    raise EngineError(f"{self.name}: {answer.error}")
                return answer
            raise AssertionError("not reached")

    async def way(self, port: int) -> int:
        """The port of this machine that leads to a port there, for as long as the machine is used here.

        Raises EngineError where that machine lets nobody through.
        """
        async with self._one:
            await self._connected()
            way = self._ways.get(port)
            if way is None:
                way = Way(port, lambda: self._connection)
                try:
                    await way.knock()
                    await way.open()
                except (OSError, asyncssh.Error) as error:
                    raise EngineError(
                        f"{self.name} lets no connection through to its port {port}: {words(error)}. Its sshd_config "
                        "has to allow it (AllowTcpForwarding), or reach='direct' does without"
                    ) from error
                self._ways[port] = way
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
            return way.here

    async def knock(self, port: int) -> bool | None:
        """Whether somebody listens at a port there, to which a way leads; None while that machine does not say."""
        way = self._ways.get(port)
        try:
            return None if way is None else await way.knock()
        except asyncssh.Error:
            return None

    def trouble(self) -> str:
        """Why nothing passes through it; "" while all is well. Any thread."""
        return self._standing.trouble(time.monotonic())

    async def close(self) -> None:
        """Ends the connection; agents live on."""
        ways = tuple(self._ways.values())
        self._ways.clear()
        for way in ways:
            way.close()
        if self._keeper is not None:
            self._keeper.cancel()
        connection = self._connection
        self._drop()
        if connection is not None:
            await connection.wait_closed()

    async def _begin(self) -> "asyncssh.SSHClientProcess[bytes]":
        connection = await self._connected()
        try:
            line = f"{shlex.quote(self._options.get('python', 'python3'))} -P -m monarch_nb.job.helper"
            helper = await connection.create_process(line, encoding=None)
        except (OSError, asyncssh.Error) as error:
            if self._connection is connection:
                self._drop()
            raise EngineError(f"{self.name}: sshd starts no command there: {words(error)}") from error
        try:
            await asyncio.wait_for(self._hello(helper), _HELLO_S)
        except (OSError, asyncssh.Error, TimeoutError) as error:
            helper.close()
            if self._connection is not connection:
                raise EngineError(f"{self.name}: the SSH connection was lost: {words(error)}") from error
            raise EngineError(
                f"{self.name}: {self._options.get('python', 'python3')} with monarch-nb does not run there: "
                f"{words(error)}. Install it there, or name its interpreter with python_exe="
            ) from error
        self._helper = helper
        return helper

    async def _connected(self) -> asyncssh.SSHClientConnection:
        """The connection, which is made if there is none. Raises EngineError."""
        if self._connection is not None:
            return self._connection
        client = self._client = _Client(self._lost)
        to = meant(self.name, self._given)
        try:
            connection = await asyncio.wait_for(self._connect(client), _CONNECT_S)
        except (OSError, asyncssh.Error, TimeoutError, ValueError) as error:
            self._drop()
            why = advice(error, to, _CONNECT_S)
            self._standing.failed(why)
            raise EngineError(f"{self.name}: {why}") from error
        if client.ended:
            self._drop()
            raise EngineError(f"{self.name}: the SSH connection was lost at once")
        self._connection = connection
        self._standing.back()
        self.address = "" if to.jumps else str((connection.get_extra_info("peername") or ("",))[0]).partition("%")[0]
        return connection

    @property
    def _given(self) -> dict[str, Any]:
        """The options of asyncssh."""
        user, _, port = read_machine(self.name)
        given: dict[str, Any] = {name: self._options[name] for name in _FOR_ASYNCSSH if name in self._options}
        number = port or self._options.get("ssh_port")
        if number:
            given["port"] = int(number)
        if user:
            given["username"] = user
        return given

    async def _connect(self, client: "_Client") -> asyncssh.SSHClientConnection:
        given = self._given
        if self._standing.cut:
            given["connect_timeout"] = _AGAIN_S
        host = read_machine(self.name).host
        connection, _ = await asyncssh.create_connection(
            lambda: client, host, keepalive_interval=_BEAT_S, keepalive_count_max=_BEATS, **given
        )
        return connection

    def _lost(self, client: "_Client", error: Exception | None) -> None:
        """The connection has ended, by itself or as it was told to."""
        if client is self._client and self._connection is not None:
            self._standing.lost(time.monotonic(), words(error) if error is not None else "the other end closed it")
            self._client = self._connection = self._helper = None
            self._cut.set()

    async def _keep(self) -> None:
        """Has the connection again whenever it is lost."""
        while True:
            await self._cut.wait()
            self._cut.clear()
            while self._connection is None:
                await asyncio.sleep(self._standing.pause)
                async with self._one:
                    try:
                        await self._connected()
                    except EngineError:
                        continue  # why is written down

    async def _hello(self, helper: "asyncssh.SSHClientProcess[bytes]") -> None:
        while line := await helper.stdout.readline():
            if line.startswith(HELLO.encode()):
                return
        said = (await helper.stderr.read()).decode(errors="replace").strip().splitlines()
        raise ConnectionError(" | ".join(said[-_LINES:]) or f"it ended with status {helper.exit_status}")

    def _dismiss(self) -> None:
        """The helper does not answer; ways stay, if the connection does."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()
        if not self._ways:
            self._drop()

    def _drop(self) -> None:
        connection, self._client, self._connection, self._helper = self._connection, None, None, None
        if connection is not None:
            connection.abort()


class _Client(asyncssh.SSHClient):  # type: ignore[misc]
    """Tells of the end of a connection."""

    def __init__(self, lost: "Callable[[_Client, Exception | None], None]") -> None:
        self.ended = False
        self._lost = lost

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self.ended = True
        self._lost(self, exc)
