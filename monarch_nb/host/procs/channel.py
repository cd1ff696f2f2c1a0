"""The agent's end of the socket it shares with one process: the spec goes down, first messages and pongs come up.

The other end is handed to a template by descriptor or inherited at exec; once every copy of it is closed, the process
has ended or has failed to start. So it is the one source for a start under way, whichever process died in between.
"""

import os
import socket
from collections.abc import Callable

from monarch_nb.host.loop import READ, WRITE, Loop
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.wire import encode_body, msgpack_decoder

PING = b"?"
_AHEAD = 1 << 31  # in the length of a message: it has a call to make before the spec arrives


class ProcChannel:
    """The channel of one process. `on_line` gets words such as `["pid", "123"]`, and `on_end` one call at the end."""

    def __init__(self, loop: Loop, spec: ProcSpec | None, on_line: Callable[[list[str]], None],
                 on_end: Callable[[], None]) -> None:  # fmt: skip
        self._loop = loop
        self._on_line = on_line
        self._on_end = on_end
        self._own, self._far = socket.socketpair()
        self._own.setblocking(False)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._fd = self._own.fileno()
        self._loop.register(self._fd, READ, self._ready)
        if spec is not None:
            self.give(spec)

    @property
    def far_fd(self) -> int:
        """The end meant for the proc; valid until `handed_over()`."""
        return self._far.fileno()

    def give(self, spec: ProcSpec) -> None:
        """Sends the spec, with which the process begins."""
        if self._fd >= 0:
            body = encode_body(spec)
            self._send(len(body).to_bytes(4, "big") + body)

    def prepare(self, call: str) -> None:
        """Makes the process call `module:function` while it waits for its spec."""
        self._send((len(call) | _AHEAD).to_bytes(4, "big") + call.encode())

    def attach(self, on_line: Callable[[list[str]], None], on_end: Callable[[], None]) -> None:
        """Replaces the callbacks from now on."""
        self._on_line, self._on_end = on_line, on_end

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

    def read_spec(self, prepare: Callable[[str], None]) -> ProcSpec:
        """Waits for the spec, and makes calls that the agent requests. Raises EOFError if the agent has ended."""
        is_spare = False
        while (length := int.from_bytes(self._exactly(4), "big")) & _AHEAD:
            is_spare = True
            prepare(self._exactly(length - _AHEAD).decode())
            self.say("ready")
        spec = msgpack_decoder(ProcSpec).decode(self._exactly(length))
        if is_spare:
            self.say("pid", os.getpid())  # it begins now
        return spec

    def serve(self, on_end: Callable[[], None]) -> None:
        """Answers pings until the agent has ended, then calls `on_end`."""
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
