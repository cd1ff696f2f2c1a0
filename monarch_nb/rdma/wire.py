"""The protocol of streams between two processes: a mutual proof of a key, then requests and bytes.

The key comes over the authenticated control link. Where the stream is to be encrypted, it is so from the number of the
key on. Each side proves that it has the key by an HMAC (RFC 2104, SHA-256) of the random numbers of both and of what
identifies the encrypted channel, so that a stranger who connects, who listens, or who stands between, gets nothing.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct

import msgspec

from monarch_nb.rdma.tunnel import binding, dialled, taken

__all__ = ["DROPPED", "GO", "HEAD", "NONCE", "READ", "WRITE", "Key", "StreamError", "greet", "receive_into", "welcome"]

NONCE = 32
READ, WRITE = 0, 1
GO, DROPPED = b"g", b"d"
HEAD = struct.Struct("<BQ16sQQ")  # READ or WRITE, number, secret, offset, size
_ID = struct.Struct("<Q")
_STEP = 4 << 20  # bytes asked of the kernel at a time


class Key(msgspec.Struct, array_like=True, frozen=True):
    """The key that both ends of a stream prove to have. Each process that asks where to dial gets its own."""

    number: int
    secret: bytes
    encrypted: bool  # whether the streams are


class StreamError(Exception):
    """The other side went away, or is not who it should be."""


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`. Raises StreamError where the stream ends before, TimeoutError as the socket does."""
    while len(target):
        count = connection.recv_into(target, min(len(target), _STEP))
        if not count:
            raise StreamError("the stream was cut")
        target = target[count:]


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; small ones."""
    room = bytearray(size)
    receive_into(connection, memoryview(room))
    return bytes(room)


def _proof(key: bytes, who: bytes, first: bytes, second: bytes, channel: bytes) -> bytes:
    return hmac.new(key, who + first + second + channel, hashlib.sha256).digest()


def greet(connection: socket.socket, key: Key) -> socket.socket:
    """The side that dialled: proves its key, and has the listener prove its own. The result is the stream.

    Raises StreamError and OSError, and has closed the connection then.
    """
    with _closing(connection) as opened:
        connection.sendall(_ID.pack(key.number))
        stream = opened.enter_context(dialled(connection)) if key.encrypted else connection
        mine, channel = secrets.token_bytes(NONCE), binding(stream)
        stream.sendall(mine)
        theirs = receive(stream, NONCE)
        proof = receive(stream, hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(key.secret, b"listener", mine, theirs, channel)):
            raise StreamError("whoever listens there does not have the key")
        stream.sendall(_proof(key.secret, b"dialler", mine, theirs, channel))
        if receive(stream, 1) != GO:
            raise StreamError("the listener refused the key")
        opened.pop_all()
    return stream


def welcome(connection: socket.socket, keys: "dict[int, Key]") -> socket.socket:
    """The side that listens: the same, the other way round. Raises StreamError for a stranger, too."""
    with _closing(connection) as opened:
        key = keys.get(_ID.unpack(receive(connection, _ID.size))[0])
        stream = opened.enter_context(taken(connection)) if key is not None and key.encrypted else connection
        mine, channel = secrets.token_bytes(NONCE), binding(stream)
        theirs = receive(stream, NONCE)
        known = key.secret if key is not None else secrets.token_bytes(NONCE)
        stream.sendall(mine + _proof(known, b"listener", theirs, mine, channel))
        proof = receive(stream, hashlib.sha256().digest_size)
        if key is None or not hmac.compare_digest(proof, _proof(key.secret, b"dialler", theirs, mine, channel)):
            raise StreamError("whoever dialled does not have the key")
        stream.sendall(GO)
        opened.pop_all()
    return stream


def _closing(connection: socket.socket) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(connection)
    return stack
