"""Endpoints of connections by TCP and inside a host: their form, limits of their sockets, and probes by ZMTP's own
greeting, before any key is sent. Imports no ZeroMQ, which a program without other hosts never needs.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from monarch_nb.routing.routes import ChannelEndpoint
from monarch_nb.transport.errors import TransportError, UnreachableError, descriptor_limit, is_descriptor_limit
from monarch_nb.transport.packing import SIZE

_SPARE = 6  # descriptors that a new connection and its monitor need, with a little room
_GREETING_LENGTH = 64  # bytes of a ZMTP 3 greeting
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # the start of a greeting


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of sockets: milliseconds, bytes, counts."""

    reconnect_ms: int = 3
    reconnect_max_ms: int = 200
    linger_ms: int = 1000
    backlog: int = 2048
    heartbeat_ms: int = 5_000  # TCP only: libzmq's own threads answer without the GIL
    heartbeat_timeout_ms: int = 20_000
    handshake_ms: int = 5_000  # TCP: the time to prove the key
    strangers: int = 256  # TCP: most connections that have not proved it
    max_frame: int = SIZE + (1 << 20)  # bytes; TCP: a larger frame cuts the connection


def ipc_endpoint(folder: Path, name: str) -> str:
    """Returns the endpoint of process `name` of the host with this run folder."""
    return checked_path(f"ipc://{os.fspath(folder / name)}")


def checked_path(endpoint: str) -> str:
    """Returns the endpoint if a unix socket can have its path. Raises TransportError."""
    path = endpoint.removeprefix("ipc://")
    if len(os.fsencode(path)) >= 100:  # 107 on Linux, 103 on macOS, with a margin
        raise TransportError(
            f"the socket path {path} is too long for this system: choose a shorter run folder "
            "(XDG_RUNTIME_DIR or TMPDIR)"
        )
    return endpoint


def spare_descriptors(purpose: str) -> None:
    """Raises DescriptorLimitError if too few descriptors are left: libzmq would only retry forever, silently."""
    spare: list[int] = []
    try:
        for _ in range(_SPARE):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if is_descriptor_limit(error):
            raise descriptor_limit(purpose) from error
    finally:
        for fd in spare:
            os.close(fd)


def bound_at(fd: int) -> str:
    """Returns a socket's endpoint in ZeroMQ's form. Raises TransportError unless it is TCP with a port."""
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            host, port, *_ = same.getsockname() if same.family in (socket.AF_INET, socket.AF_INET6) else ("", 0)
    except OSError as error:
        raise TransportError(f"descriptor {fd} is not a socket: {error}") from error
    if not port:
        raise TransportError(f"descriptor {fd} is not a TCP socket that is bound to a port")
    return ChannelEndpoint("tcp", host=host, port=port).url


# -- probes ------------------------------------------------------------------------------------------------------------


class Unready(UnreachableError):
    """Nobody listens, or the listener hangs up at once; that may change in a moment."""


def split(endpoint: str) -> tuple[str, int]:
    """Returns host and port of "tcp://host:port". Raises ValueError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not an address of a host: it should look like tcp://node7:22222")
    return host.strip("[]"), int(port)


def knock(endpoint: str, timeout: float) -> bool | None:
    """Returns True if the endpoint is listening, False if it refuses, None without a reply in `timeout` seconds."""
    try:
        with socket.create_connection(split(endpoint), timeout):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def greet(endpoint: str, timeout: float, stay: float = 0.0) -> str:
    """Returns the security mechanism ("CURVE", "NULL") of a ZeroMQ socket; raises UnreachableError, with the reason.

    With `stay` the endpoint must also keep the connection for so many seconds, which an overloaded one does not.
    """
    host, port = split(endpoint)
    try:
        connection = socket.create_connection((host, port), timeout)
    except ConnectionRefusedError:
        raise Unready(f"nobody listens at {endpoint}") from None
    except socket.gaierror as error:
        raise UnreachableError(f"{endpoint}: no machine is known as {host!r} here ({error.strerror})") from None
    except TimeoutError:
        raise UnreachableError(f"{endpoint} does not answer: no such machine, or a firewall between") from None
    except OSError as error:
        raise UnreachableError(f"{endpoint} cannot be reached: {error.strerror or error}") from None
    greeting, silent = b"", True
    with connection:
        try:
            connection.settimeout(timeout)
            connection.sendall(_SIGNATURE + b"\x03")  # only the greeting: another mechanism would end it early
            while len(greeting) < _GREETING_LENGTH and _is_ours(greeting):
                more = connection.recv(_GREETING_LENGTH - len(greeting))
                if not more:
                    silent = False
                    break
                greeting += more
            if stay and len(greeting) == _GREETING_LENGTH:
                connection.settimeout(stay)
                connection.recv(1)
                greeting, silent = b"", False
        except ConnectionError:
            silent = False
        except OSError:
            pass  # the bytes received so far suffice
    if not silent and len(greeting) < _GREETING_LENGTH and _is_ours(greeting):
        raise Unready(
            f"what listens at {endpoint} closes the connection: it is not a monarch-nb host agent, or too many "
            "strangers connect to it"
        )
    if not greeting:
        raise UnreachableError(f"whatever listens at {endpoint} says nothing: it is not a monarch-nb host agent")
    if len(greeting) < _GREETING_LENGTH or not _is_ours(greeting) or greeting[10] < 3:
        raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent; it says {greeting[:24]!r}")
    mechanism = greeting[12:32].rstrip(b"\0")
    with contextlib.suppress(UnicodeDecodeError):
        return mechanism.decode("ascii")
    raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent")


def _is_ours(greeting: bytes) -> bool:
    """Returns whether this may be the start of a ZMTP greeting."""
    return greeting[:1] in (b"", b"\xff") and (len(greeting) < 10 or bool(greeting[9] & 1))
