"""One machine at the other end of an SSH connection, its name, and the helper that runs there."""

import asyncio
import contextlib
import errno
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import asyncssh
import msgspec

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.report import HELLO, Ask, HelperReply
from monarch_nb.wire import json_decoder


class MachineName(NamedTuple):
    """The parts of `[user@]name[:port]`; "" for absent ones."""

    user: str
    host: str
    port: str


def read_machine(machine: str) -> MachineName:
    """Parses a machine's name. An IPv6 address stands alone, or in brackets before a port."""
    user, _, address = machine.rpartition("@")
    if address.startswith("[") and "]" in address:
        host, _, rest = address[1:].partition("]")
        if not rest or (rest[0] == ":" and rest[1:].isdecimal()):
            return MachineName(user, host, rest[1:])
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and ":" not in host:
        return MachineName(user, host, port)
    return MachineName(user, address, "")


_CONNECT_S = 20.0
_AGAIN_S = 5.0  # the same for a machine that has answered before: it may be back a moment later
_HELLO_S = 60.0  # for an interpreter on a slow file system
_ANSWER_S = 120.0
_BEAT_S, _BEATS = 5.0, 3  # after which a silent connection is given up
_FOR_ASYNCSSH = ("username", "client_keys", "known_hosts", "config", "tunnel")
_LINES = 5
_FIRST_S, _LAST_S = 0.5, 3.0  # between attempts to connect again
_SSHD = 22
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)
_AT_ONCE = 1 << 18  # bytes
_LOOPBACK = "127.0.0.1"


class ConnectionState:
    """The state of one connection. Times are those of a monotonic clock, in seconds; no I/O."""

    def __init__(self) -> None:
        self._cut_at: float | None = None
        self._cut_by = ""
        self._failure = ""
        self._pause = _FIRST_S

    @property
    def cut(self) -> bool:
        """True while the connection is broken."""
        return self._cut_at is not None

    def lost(self, now: float, reason: str) -> None:
        """Records that the connection has broken."""
        if self._cut_at is None:
            self._cut_at, self._cut_by, self._failure, self._pause = now, reason, "", _FIRST_S

    def failed(self, reason: str) -> None:
        """Records a failed attempt to restore it."""
        self._failure = reason
        self._pause = min(1.5 * self._pause, _LAST_S)

    def back(self) -> None:
        """Records that the connection works again."""
        self._cut_at = None

    @property
    def pause(self) -> float:
        """Seconds until the next attempt."""
        return self._pause

    def trouble(self, now: float) -> str:
        """Returns why nothing passes; "" while the connection works."""
        if self._cut_at is None:
            return ""
        text = f"the SSH connection is cut for {max(0, round(now - self._cut_at))} s ({self._cut_by})"
        return f"{text}; the last attempt to have it again: {self._failure}" if self._failure else text


class DialTarget(NamedTuple):
    """The address that SSH dials for a machine's name, according to its configuration."""

    name: str  # as users write it
    host: str
    port: int
    jumps: bool = False  # by another machine, or a command, which dials it

    def __str__(self) -> str:
        text, alias = f"port {self.port} of {self.host}", read_machine(self.name).host
        return text if alias == self.host else f"{text} (which {alias} is in ~/.ssh/config)"


def dial_target(name: str, arguments: dict[str, Any]) -> DialTarget:
    """Returns the address that SSH dials for a machine, its name if unknown; `arguments` are asyncssh's options."""
    host = read_machine(name).host
    user_config = Path.home() / ".ssh" / "config"
    config = arguments.get("config") or ([user_config] if user_config.is_file() else [])
    try:
        number = {"port": arguments["port"]} if "port" in arguments else {}
        options = asyncssh.SSHClientConnectionOptions(host=host, config=config, **number)
        jumps = bool(options.tunnel or options.proxy_command or arguments.get("tunnel"))
        return DialTarget(name, options.host or host, options.port or _SSHD, jumps)
    except (OSError, ValueError, asyncssh.Error):
        return DialTarget(name, host, int(arguments.get("port", _SSHD)))


def _reason(error: BaseException) -> str:
    """Returns the text of an error without unhelpful numbers, or the name of its class."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip() or type(error).__name__


def advice(error: BaseException, to: DialTarget, seconds: float) -> str:
    """Explains a failed connection, with a remedy."""
    alone = read_machine(to.name)
    by_hand = (
        f"ssh {'-p ' + alone.port + ' ' if alone.port else ''}{alone.user + '@' if alone.user else ''}{alone.host}"
    )
    if isinstance(error, asyncssh.PermissionDenied):
        return (
            f"the login was refused ({_reason(error)}): it must go without a password. Put a key there (ssh-copy-id "
            f"{to.name}), or name one with ssh_args='-i FILE'; keys with a passphrase need an ssh-agent"
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return f"its host key is not known here ({_reason(error)}): log in once by hand ({by_hand}) and check it"
    if isinstance(error, TimeoutError) or getattr(error, "errno", 0) == errno.ETIMEDOUT:
        return f"no answer from {to} within {seconds:g} s: no such machine, or a firewall between"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{to} refuses the connection: no SSH server listens there. Look whether sshd runs on that machine, and at "
            "which port ('me@node:2222' names another one)"
        )
    if isinstance(error, socket.gaierror):
        return (
            f"no machine is known here as {to.host!r} ({error.strerror}): is it spelt right? Else give its address, or "
            f"a HostName for it in ~/.ssh/config, and try it by hand ({by_hand})"
        )
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}. It was named for the connection: see ssh_args and known_hosts"
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return f"no way leads from here to {to} ({error.strerror}): is that machine up, and this one in its network?"
    if isinstance(error, asyncssh.ConnectionLost | ConnectionError):
        return f"{to} broke the connection off ({_reason(error)}): try it by hand ({by_hand}), and see sshd's log there"
    return f"no connection to {to}: {_reason(error)}"


class PortForward:
    """A local port until it is closed; while the SSH connection is cut, clients are disconnected at once.

    So a refusal never comes from this end. Used on one event loop alone.
    """

    def __init__(self, port: int, connection: Callable[[], "asyncssh.SSHClientConnection | None"]) -> None:
        """`port` is a port of the machine; `connection` returns the current SSH connection."""
        self.port = port
        self.here = 0  # the port of this machine, once it is open
        self._connection = connection
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens. Raises OSError."""
        self._server = await asyncio.start_server(self._dialled, "127.0.0.1", 0)
        self.here = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stops listening. Open connections remain."""
        if self._server is not None:
            self._server.close()

    async def knock(self) -> bool | None:
        """Returns whether the port of the machine is open: False if the machine refuses, None while unknown.

        Raises asyncssh.ChannelOpenError where that machine does not allow forwarding.
        """
        connection = self._connection()
        if connection is None:
            return None
        try:
            _, writer = await connection.open_connection(_LOOPBACK, self.port)
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
            from_there, to_there = await connection.open_connection(_LOOPBACK, self.port)
            passing = {asyncio.create_task(_pass(reader, to_there)), asyncio.create_task(_pass(from_there, writer))}
            try:
                # Our peers close both directions at once: the end of one is the end of both.
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


class SSHMachine:
    """A connection that is made at the first request, and again after it was lost. Used on one event loop alone.

    While ports are forwarded through it, a lost connection is restored without a request.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.jobs: set[str] = set()  # jobs that this process has there
        self.busy = 0  # requests on their way
        self.address = ""  # the IP address that SSH dialled; "" where a jump host did
        self._options = options
        self._lock = asyncio.Lock()
        self._client: _Client | None = None  # of the current connection, or the one that is being made
        self._connection: asyncssh.SSHClientConnection | None = None
        self._helper: asyncssh.SSHClientProcess[bytes] | None = None
        self._standing = ConnectionState()
        self._cut = asyncio.Event()
        self._ways: dict[int, PortForward] = {}  # by the ports there
        self._keeper: asyncio.Task[None] | None = None

    async def ask(self, request: Ask) -> HelperReply:
        """Returns the helper's answer. Raises EngineError."""
        async with self._lock:
            for attempt in (0, 1):
                fresh = self._helper is None
                helper = self._helper or await self._begin()
                try:
                    helper.stdin.write(msgspec.json.encode(request) + b"\n")
                    line = await asyncio.wait_for(helper.stdout.readline(), _ANSWER_S)
                    if not line:
                        raise ConnectionError("the connection was closed")
                    answer = json_decoder(HelperReply).decode(line)
                except (OSError, asyncssh.Error, TimeoutError, msgspec.MsgspecError) as error:
                    self._dismiss()
                    if fresh or attempt or request.do == "start":
                        raise EngineError(f"{self.name} has not answered: {_reason(error)}") from error
                    continue  # it was lost some time ago
                if answer.error:
                    raise EngineError(f"{self.name}: {answer.error}")
                return answer
            raise AssertionError("not reached")

    async def way(self, port: int) -> int:
        """Returns the port of this machine that leads to a port there, for as long as the machine is used here.

        Raises EngineError where that machine does not allow forwarding.
        """
        async with self._lock:
            await self._connected()
            way = self._ways.get(port)
            if way is None:
                way = PortForward(port, lambda: self._connection)
                try:
                    await way.knock()
                    await way.open()
                except (OSError, asyncssh.Error) as error:
                    raise EngineError(
                        f"{self.name} lets no connection through to its port {port}: {_reason(error)}. Its sshd_config "
                        "has to allow it (AllowTcpForwarding), or reach='direct' does without"
                    ) from error
                self._ways[port] = way
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
            return way.here

    async def knock(self, port: int) -> bool | None:
        """Returns whether a forwarded port is open at the machine; None while unknown."""
        way = self._ways.get(port)
        try:
            return None if way is None else await way.knock()
        except asyncssh.Error:
            return None

    def trouble(self) -> str:
        """Returns why nothing passes through the connection; "" while all is well. Any thread."""
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
            raise EngineError(f"{self.name}: sshd starts no command there: {_reason(error)}") from error
        try:
            await asyncio.wait_for(self._hello(helper), _HELLO_S)
        except (OSError, asyncssh.Error, TimeoutError) as error:
            helper.close()
            if self._connection is not connection:
                raise EngineError(f"{self.name}: the SSH connection was lost: {_reason(error)}") from error
            raise EngineError(
                f"{self.name}: {self._options.get('python', 'python3')} with monarch-nb does not run there: "
                f"{_reason(error)}. Install it there, or name its interpreter with python_exe="
            ) from error
        self._helper = helper
        return helper

    async def _connected(self) -> asyncssh.SSHClientConnection:
        """Returns the connection; makes it if there is none. Raises EngineError."""
        if self._connection is not None:
            return self._connection
        client = self._client = _Client(self._lost)
        to = dial_target(self.name, self._ssh_options)
        try:
            connection = await asyncio.wait_for(self._connect(client), _CONNECT_S)
        except (OSError, asyncssh.Error, TimeoutError, ValueError) as error:
            self._drop()
            reason = advice(error, to, _CONNECT_S)
            self._standing.failed(reason)
            raise EngineError(f"{self.name}: {reason}") from error
        if client.ended:
            self._drop()
            raise EngineError(f"{self.name}: the SSH connection was lost at once")
        self._connection = connection
        self._standing.back()
        self.address = "" if to.jumps else str((connection.get_extra_info("peername") or ("",))[0]).partition("%")[0]
        return connection

    @property
    def _ssh_options(self) -> dict[str, object]:
        """Options for asyncssh."""
        user, _, port = read_machine(self.name)
        options: dict[str, Any] = {name: self._options[name] for name in _FOR_ASYNCSSH if name in self._options}
        number = port or self._options.get("ssh_port")
        if number:
            options["port"] = int(number)
        if user:
            options["username"] = user
        return options

    async def _connect(self, client: "_Client") -> asyncssh.SSHClientConnection:
        options = self._ssh_options
        if self._standing.cut:
            options["connect_timeout"] = _AGAIN_S
        host = read_machine(self.name).host
        connection, _ = await asyncssh.create_connection(
            lambda: client, host, keepalive_interval=_BEAT_S, keepalive_count_max=_BEATS, **options
        )
        return connection

    def _lost(self, client: "_Client", error: Exception | None) -> None:
        """Handles the end of the connection, unexpected or requested."""
        if client is self._client and self._connection is not None:
            self._standing.lost(time.monotonic(), _reason(error) if error is not None else "the other end closed it")
            self._client = self._connection = self._helper = None
            self._cut.set()

    async def _keep(self) -> None:
        """Restores the connection whenever it is lost."""
        while True:
            await self._cut.wait()
            self._cut.clear()
            while self._connection is None:
                await asyncio.sleep(self._standing.pause)
                async with self._lock:
                    try:
                        await self._connected()
                    except EngineError:
                        continue  # the reason is recorded

    async def _hello(self, helper: "asyncssh.SSHClientProcess[bytes]") -> None:
        while line := await helper.stdout.readline():
            if line.startswith(HELLO.encode()):
                return
        errors = (await helper.stderr.read()).decode(errors="replace").strip().splitlines()
        raise ConnectionError(" | ".join(errors[-_LINES:]) or f"it ended with status {helper.exit_status}")

    def _dismiss(self) -> None:
        """Drops a helper that does not answer; forwarded ports stay, if the connection does."""
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
    """Reports the end of a connection."""

    def __init__(self, lost: "Callable[[_Client, Exception | None], None]") -> None:
        self.ended = False
        self._lost = lost

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        self.ended = True
        self._lost(self, exc)
