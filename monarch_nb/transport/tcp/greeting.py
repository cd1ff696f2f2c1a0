"""Probes of a TCP endpoint by ZMTP's own greeting, before any key is sent."""

import contextlib
import socket

from monarch_nb.transport.errors import UnreachableError


class Unready(UnreachableError):
    """Nobody listens, or the listener hangs up at once; that may change in a moment."""


_LENGTH = 64  # bytes of a ZMTP 3 greeting
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"


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
            while len(greeting) < _LENGTH and _is_ours(greeting):
                more = connection.recv(_LENGTH - len(greeting))
                if not more:
                    silent = False
                    break
                greeting += more
            if stay and len(greeting) == _LENGTH:
                connection.settimeout(stay)
                connection.recv(1)
                greeting, silent = b"", False
        except ConnectionError:
            silent = False
        except OSError:
            pass  # the bytes received so far suffice
    if not silent and len(greeting) < _LENGTH and _is_ours(greeting):
        raise Unready(
            f"what listens at {endpoint} closes the connection: it is not a monarch-nb host agent, or too many "
            "strangers connect to it"
        )
    if not greeting:
        raise UnreachableError(f"whatever listens at {endpoint} says nothing: it is not a monarch-nb host agent")
    if len(greeting) < _LENGTH or not _is_ours(greeting) or greeting[10] < 3:
        raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent; it says {greeting[:24]!r}")
    mechanism = greeting[12:32].rstrip(b"\0")
    with contextlib.suppress(UnicodeDecodeError):
        return mechanism.decode("ascii")
    raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent")


def _is_ours(greeting: bytes) -> bool:
    """Returns whether this may be the start of a ZMTP greeting."""
    return greeting[:1] in (b"", b"\xff") and (len(greeting) < 10 or bool(greeting[9] & 1))
