"""What is written on a stream between two processes: a mutual proof of one key, then requests and bytes.

The key comes over the authenticated control link. Each side proves that it has it by an HMAC (RFC 2104, SHA-256) of the
random numbers of both, so that a stranger who connects, or a stranger who listens, gets nothing. The bytes that
follow are not encrypted: where they must be, `rdma_movers` leaves streams out.
"""

import hashlib
import hmac
import secrets
import socket
import struct

__all__ = ["DROPPED", "GO", "HEAD", "NONCE", "READ", "WRITE", "StreamError", "greet", "receive_into", "welcome"]

NONCE = 32
READ, WRITE = 0, 1
GO, DROPPED = b"g", b"d"
HEAD = struct.Struct("<BQ16sQQ")  # READ or WRITE, number, secret, offset, size
_ID = struct.Struct("<Q")
_STEP = 4 << 20  # bytes asked of the kernel at a time


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


def _proof(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, who + first + second, hashlib.sha256).digest()


def greet(connection: socket.socket, key_number: int, key: bytes) -> None:
    """The side that dialled: proves its key, and has the listener prove its own."""
    mine = secrets.token_bytes(NONCE)
    connection.sendall(_ID.pack(key_number) + mine)
    theirs = receive(connection, NONCE)
    proof = receive(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(key, b"listener", mine, theirs)):
        raise StreamError("whoever listens there does not have the key")
    connection.sendall(_proof(key, b"dialler", mine, theirs))
    if receive(connection, 1) != GO:
        raise StreamError("the listener refused the key")


def welcome(connection: socket.socket, keys: "dict[int, bytes]") -> bool:
    """The side that listens: the same, the other way round; False for a stranger."""
    first = receive(connection, _ID.size + NONCE)
    key = keys.get(_ID.unpack_from(first)[0])
    theirs, mine = first[_ID.size :], secrets.token_bytes(NONCE)
    known = key if key is not None else secrets.token_bytes(NONCE)  # a stranger does not learn which numbers there are
    connection.sendall(mine + _proof(known, b"listener", theirs, mine))
    proof = receive(connection, hashlib.sha256().digest_size)
    if key is None or not hmac.compare_digest(proof, _proof(key, b"dialler", theirs, mine)):
        return False
    connection.sendall(GO)
    return True
