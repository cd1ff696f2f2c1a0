"""The agent's end of the socket it shares with one process: the spec goes down, first messages and pongs come up.

The other end is handed to a template by descriptor or inherited at exec; once every copy of it is closed, the process
is gone or has failed to start. That makes it the one source for a start under way, whoever died in between.
"""

import os
import socket
from collections.abc import Callable

from monarch_nb.host.loop import READ, WRITE, Loop
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.wire import encode_body, msgpack_decoder

PING = b"?"


class ProcChannel:
    """The channel of one process. `on_line` gets words such as `["pid", "123"]`, and `on_end` one call at the end."""

    def __init__(self, loop: Loop, spec: ProcSpec, on_line: Callable[[list[str]], None],
                 on_end: Callable[[], None]) -> None:  # fmt: skip
        self._loop = loop
        self._on_line = on_line
        self._on_end = on_end
        self._own, self._far = socket.socketpair()
        self._own.setblocking(False)
        self._incoming = bytearray()
        body = encode_body(spec)
        self._outgoing = bytearray(len(body).to_bytes(4, "big") + body)
        self._fd = self._own.fileno()
        self._loop.register(self._fd, READ | WRITE, self._ready)

    @property
    def far_fd(self) -> int:
        """The end meant for the proc; valid until `handed_over()`."""
        return self._far.fileno()

    def handed_over(self) -> None:
        """Closes this copy of the far end, once the process (or its starter) has its own."""
        self._far.close()

    def ping(self) -> None:
        """Asks whether the process still runs Python; it answers with the line `pong`."""
        if self._fd >= 0:
            self._send(PING)

    def drain(self) -> None:
        """Reads what has arrived."""
        if self._fd >= 0:
            self._ready(READ)

    def close(self) -> None:
        """Closes the channel, without `on_end`."""
        if self._fd >= 0:
            self._loop.unregister(self._fd)
            self._fd = -1
            self._own.close()
            self._far.close()

    def _send(self, data: bytes) -> None:
        self._outgoing += data
        self._loop.modify(self._fd, READ | WRITE, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and self._fd >= 0:
            self._read()

    def _flush(self) -> None:
        try:
            del self._outgoing[: self._own.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # the reading side reports the end
        if not self._outgoing:
            self._loop.modify(self._fd, READ, self._ready)

    def _read(self) -> None:
        ended = False
        while not ended:
            try:
                data = self._own.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            ended = not data
            self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            self._on_line(line.decode("utf-8", "replace").split(" "))
        if ended and self._fd >= 0:
            self.close()
            self._on_end()


class AgentChannel:
    """The process's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, *words: object) -> None:
        """Sends a line to the agent; a lost agent is noticed elsewhere."""
        try:
            os.write(self._fd, " ".join(str(word).replace("\n", "; ") for word in words).encode() + b"\n")
        except OSError:
            pass

    def read_spec(self) -> ProcSpec:
        """Waits for the spec. Raises EOFError if the agent is gone."""
        length = int.from_bytes(self._exactly(4), "big")
        return msgpack_decoder(ProcSpec).decode(self._exactly(length))

    def serve(self, on_end: Callable[[], None]) -> None:
        """Answers pings until the agent is gone, then call `on_end`."""
        while True:
            try:
                data = os.read(self._fd, 64)
            except OSError:
                data = b""
            if not data:
                return on_end()
            self.say("pong")

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(self._fd, count - len(data))
            if not more:
                raise EOFError("the host agent is gone")
            data += more
        return data
