"""The protocol of streams between two processes: a mutual proof of a key, then requests and bytes.

The key arrives by the authenticated control link. An encrypted stream is encrypted from the number of the
key on. Each side proves that it has the key by an HMAC (RFC 2104, SHA-256) of the random numbers of both and of the
identity of the encrypted channel, so that a stranger who connects, listens, or stands between the two learns nothing.

Streams that leave a machine are encrypted by TLS 1.2 without certificates, bound to the proof of the key. Both ends
agree on keys by an anonymous Diffie-Hellman exchange (RFC 5246, in the group ffdhe3072 of RFC 7919), which hides the
bytes from listeners. A man in the middle, which such an exchange alone admits, is detected by the proof of the
key: it covers the identity of the encrypted channel ("tls-unique", RFC 5929, sound with the extended master secret of
RFC 7627). TLS 1.3 with that key itself would be simpler, but Python supports it only from 3.13 on.
"""

import base64
import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import tempfile
import time

import msgspec

NONCE = 32
READ, WRITE = 0, 1
GO, DROPPED = b"g", b"d"
HEAD = struct.Struct("<BQ16sQQ")  # READ or WRITE, number, secret, offset, size
_ID = struct.Struct("<Q")
_STEP = 4 << 20  # bytes requested from the kernel at a time


class Key(msgspec.Struct, array_like=True, frozen=True):
    """The key that both ends of a stream prove to have. Each process that dials has its own."""

    number: int
    secret: bytes
    encrypted: bool  # whether the streams are encrypted


class StreamError(Exception):
    """The other side has gone, or is not the expected process."""


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`. Raises StreamError where the stream ends before, TimeoutError as the socket does."""
    while len(target):
        count = connection.recv_into(target, min(len(target), _STEP))
        if not count:
            raise StreamError("the stream was cut")
        target = target[count:]


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives a small number of bytes within the time-out of the socket altogether: strangers may send one by one."""
    data, limit, began = b"", connection.gettimeout(), time.monotonic()
    while len(data) < size:
        if limit is not None:
            connection.settimeout(max(1e-3, began + limit - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise StreamError("the stream was cut")
        data += more
    connection.settimeout(limit)
    return data


def _proof(key: bytes, role: bytes, first: bytes, second: bytes, channel: bytes) -> bytes:
    return hmac.new(key, role + first + second + channel, hashlib.sha256).digest()


def greet(connection: socket.socket, key: Key) -> socket.socket:
    """Proves the key to the listener, and has it prove its own; returns the stream. For the dialling side.

    Raises StreamError and OSError after closing the connection.
    """
    with _closing(connection) as opened:
        connection.sendall(_ID.pack(key.number))
        stream = opened.enter_context(client_stream(connection)) if key.encrypted else connection
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
    """Does the same for the listening side. Raises StreamError for a stranger, too."""
    with _closing(connection) as opened:
        key = keys.get(_ID.unpack(receive(connection, _ID.size))[0])
        stream = opened.enter_context(server_stream(connection)) if key is not None and key.encrypted else connection
        mine, channel = secrets.token_bytes(NONCE), binding(stream)
        theirs = receive(stream, NONCE)
        secret = key.secret if key is not None else secrets.token_bytes(NONCE)
        stream.sendall(mine + _proof(secret, b"listener", theirs, mine, channel))
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


_CIPHER = "ADH-AES128-GCM-SHA256"
_BITS, _OFFSET = 3072, 2625351  # RFC 7919, A.2


class TunnelError(OSError):
    """This Python cannot encrypt streams (its OpenSSL has no anonymous exchange), or the other side cannot."""


def client_stream(connection: socket.socket) -> ssl.SSLSocket:
    """Returns the encrypted stream on a connection, for the dialling side. Raises TunnelError, and other OSErrors."""
    return _context(False).wrap_socket(connection)


def server_stream(connection: socket.socket) -> ssl.SSLSocket:
    """As `client_stream`, for the listening side."""
    return _context(True).wrap_socket(connection, server_side=True)


def make_ready() -> None:
    """Prepares `server_stream`, which takes milliseconds the first time. Raises TunnelError."""
    _context(True)


def binding(connection: socket.socket) -> bytes:
    """Returns the channel binding, known to both ends only; empty for an unencrypted connection."""
    if not isinstance(connection, ssl.SSLSocket):
        return b""
    unique = connection.get_channel_binding("tls-unique")
    if not unique:
        raise TunnelError("the encrypted stream says nothing that identifies it")
    return unique


@functools.cache
def _context(listens: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # there are no certificates
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.set_ciphers(f"{_CIPHER}:@SECLEVEL=0")  # only the lowest level allows anonymous exchanges
        if listens:
            _load_group(context)
    except ssl.SSLError as error:
        raise TunnelError(f"streams cannot be encrypted here: {ssl.OPENSSL_VERSION} refuses {_CIPHER}") from error
    return context


def _load_group(context: ssl.SSLContext) -> None:
    """Loads the group from a file, since OpenSSL accepts nothing else."""
    prime, generator = _integer(_prime(_BITS, _OFFSET)), _integer(2)
    text = base64.encodebytes(_sequence(prime + generator)).decode()
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"-----BEGIN DH PARAMETERS-----\n{text}-----END DH PARAMETERS-----\n")
        file.flush()
        context.load_dh_params(os.fspath(file.name))


def _prime(bits: int, offset: int) -> int:
    """Returns the prime of RFC 7919, A: 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1; e is the sum of 1/n!."""
    spare = 64  # bits for rounding errors of the sum
    total = term = 1 << (bits - 130 + spare)
    number = 1
    while term:
        term //= number
        total += term
        number += 1
    return (1 << bits) - (1 << (bits - 64)) + ((total >> spare) + offset << 64) - 1


def _integer(value: int) -> bytes:
    """Returns an INTEGER of X.690 (DER)."""
    return b"\x02" + _counted(value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _sequence(content: bytes) -> bytes:
    return b"\x30" + _counted(content)


def _counted(content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes((size,)) + content
    count = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((0x80 | len(count),)) + count + content
