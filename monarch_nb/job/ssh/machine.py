"""One machine at the other end of an SSH connection, with a helper that runs there."""

import asyncio
import shlex
from collections.abc import Mapping
from typing import Any

import asyncssh
import msgspec

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.helper import HELLO, Answer, Ask
from monarch_nb.job.ssh.places import read_machine
from monarch_nb.wire import json_decoder

_CONNECT_S = 20.0
_HELLO_S = 60.0  # for an interpreter on a slow file system
_ANSWER_S = 120.0
_BEAT_S, _BEATS = 5.0, 3  # a connection on which nothing is heard for so long is given up
_FOR_ASYNCSSH = ("username", "client_keys", "known_hosts", "config", "tunnel")
_LINES = 5


class Machine:
    """Connected when it is first asked, and again when the connection was lost. Used on one event loop alone."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.jobs: set[str] = set()  # that this process has there
        self.busy = 0  # requests on their way
        self._options = options
        self._one = asyncio.Lock()
        self._connection: asyncssh.SSHClientConnection | None = None
        self._helper: asyncssh.SSHClientProcess[bytes] | None = None
        self._ways: dict[int, int] = {}  # ports there, and those here that lead to them
        self._listeners: list[asyncssh.SSHListener] = []

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
                    self._drop()
                    if fresh or attempt or request.do == "start":
                        raise EngineError(f"{self.name} has not answered: {_words(error)}") from error
                    continue  # it was lost some time ago
                if answer.error:
                    raise EngineError(f"{self.name}: {answer.error}")
                return answer
            raise AssertionError("not reached")

    async def way(self, port: int) -> int:
        """The port of this machine that leads to a port there; the same again after the connection was lost."""
        async with self._one:
            if self._helper is None:
                await self._begin()
            if port not in self._ways:
                await self._forward(0, port)
            return self._ways[port]

    async def close(self) -> None:
        """Ends the connection; agents live on."""
        self._ways.clear()
        connection = self._connection
        self._drop()
        if connection is not None:
            await connection.wait_closed()

    async def _begin(self) -> "asyncssh.SSHClientProcess[bytes]":
        try:
            self._connection = connection = await asyncio.wait_for(self._connect(), _CONNECT_S)
            line = f"{shlex.quote(self._options.get('python', 'python3'))} -P -m monarch_nb.job.helper"
            helper = await connection.create_process(line, encoding=None)
        except (OSError, asyncssh.Error, TimeoutError, ValueError) as error:
            self._drop()
            raise EngineError(f"{self.name}: {_advice(error, self.name)}") from error
        try:
            await asyncio.wait_for(self._hello(helper), _HELLO_S)
        except (OSError, asyncssh.Error, TimeoutError) as error:
            self._drop()
            raise EngineError(
                f"{self.name}: {self._options.get('python', 'python3')} with monarch-nb does not run there: "
                f"{_words(error)}. Install it there, or name its interpreter with python_exe="
            ) from error
        self._helper = helper
        for port, here in tuple(self._ways.items()):
            await self._forward(here, port)
        return helper

    async def _connect(self) -> asyncssh.SSHClientConnection:
        user, host, port = read_machine(self.name)
        given: dict[str, Any] = {name: self._options[name] for name in _FOR_ASYNCSSH if name in self._options}
        number = port or self._options.get("ssh_port")
        if number:
            given["port"] = int(number)
        if user:
            given["username"] = user
        return await asyncssh.connect(host, keepalive_interval=_BEAT_S, keepalive_count_max=_BEATS, **given)

    async def _hello(self, helper: "asyncssh.SSHClientProcess[bytes]") -> None:
        while line := await helper.stdout.readline():
            if line.startswith(HELLO.encode()):
                return
        said = (await helper.stderr.read()).decode(errors="replace").strip().splitlines()
        raise ConnectionError(" | ".join(said[-_LINES:]) or f"it ended with status {helper.exit_status}")

    async def _forward(self, here: int, port: int) -> None:
        assert self._connection is not None
        try:
            listener = await self._connection.forward_local_port("127.0.0.1", here, "127.0.0.1", port)
        except (OSError, asyncssh.Error) as error:
            raise EngineError(f"{self.name} lets no connection through to its port {port}: {_words(error)}") from error
        self._listeners.append(listener)
        self._ways[port] = listener.get_port()

    def _drop(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        connection, self._connection, self._helper = self._connection, None, None
        if connection is not None:
            connection.abort()


def _words(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _advice(error: BaseException, name: str) -> str:
    """What went wrong with a connection, and what to do."""
    if isinstance(error, asyncssh.PermissionDenied):
        return (
            f"the login was refused ({_words(error)}): it must go without a password. Put a key there (ssh-copy-id "
            f"{name}), or name one with ssh_args='-i FILE'; keys with a passphrase need an ssh-agent"
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return f"its host key is not known here ({_words(error)}): log in once by hand (ssh {name}) and check it"
    if isinstance(error, TimeoutError):
        return f"no answer within {_CONNECT_S:g} s: no such machine, or a firewall between"
    return f"no connection: {_words(error)}"
