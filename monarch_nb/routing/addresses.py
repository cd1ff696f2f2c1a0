"""Addresses of workers as users write them: `tcp://host:port`, `ipc://path`, with a bind address or process id.

address  = [process-id "@"] endpoint ["@" endpoint]      (where to dial it, then where it binds)
endpoint = "tcp://" host ":" port | "tcp://" host ":fd" number | "ipc://" path

`fd` is a socket that the worker inherits and that is bound already: so the starter of workers can choose free
ports without a race.
"""

import re

from msgspec import Struct

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_DESCRIPTOR = re.compile(r"fd[0-9]{1,7}", re.ASCII)
_PROCESS = re.compile(r"[^\s@/]+")
_LONGEST = 4096
_FORMS = "known forms are tcp://host:port, ipc://path, tcp://host:port@tcp://0.0.0.0:port and process-id@tcp://..."


class AddressError(ValueError):
    """A text that is no address of a worker; the message says what is wrong with it and shows a valid one."""


class ChannelEndpoint(Struct, frozen=True):
    """One end of a channel: a TCP host and port, an inherited socket, or the path of a socket on this machine."""

    scheme: str  # tcp or ipc
    host: str = ""
    port: int = 0  # 0: any free port, only for binding
    path: str = ""
    fd: int | None = None  # of a bound socket, only for binding

    @property
    def url(self) -> str:
        """The URL in the form of ZeroMQ."""
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port if self.fd is None else f'fd{self.fd}'}"

    def __str__(self) -> str:
        return self.url


class WorkerAddress(Struct, frozen=True):
    """The endpoints at which others dial a worker and at which it binds (mostly the same), and its process id."""

    dial: ChannelEndpoint
    bind: ChannelEndpoint
    process: str = ""

    def __str__(self) -> str:
        head = f"{self.process}@" if self.process else ""
        return f"{head}{self.dial}" + ("" if self.bind == self.dial else f"@{self.bind}")


def parse_worker_address(text: str) -> WorkerAddress:
    """Reads an address. Raises AddressError, and NotImplementedError for `tcp://*` and unsupported transports."""
    if not isinstance(text, str):
        raise AddressError(f"an address is a text, not {type(text).__name__}: {_FORMS}")
    if len(text) > _LONGEST or any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise AddressError(f"{_shown(text)} is not an address: it is too long, or has control characters in it")
    first = _SCHEME.search(text)
    if first is None:
        raise AddressError(f"{_shown(text)} does not begin with a transport: {_FORMS}")
    head, endpoints = text[: first.start()], text[first.start() :]
    process = ""
    if head:
        process = head.removesuffix("@")
        if process == head or not _PROCESS.fullmatch(process):
            raise AddressError(f"{_shown(head)} before {first[0]} is not a process id with an @ after it: {_FORMS}")
    dial, bind = _split(endpoints)
    dialled = _endpoint(dial, text, binds=False)
    bound = dialled if bind is None else _endpoint(bind, text, binds=True)
    if bound.scheme != dialled.scheme:
        raise AddressError(
            f"{_shown(text)} dials with {dialled.scheme} but binds with {bound.scheme}: use the same transport for both"
        )
    return WorkerAddress(dialled, bound, process)


def parse_dialled(text: str) -> ChannelEndpoint:
    """Returns the endpoint to dial for an address. Raises what `parse_worker_address` does."""
    endpoint = parse_worker_address(text).dial
    if endpoint.fd is not None:
        raise AddressError(f"{_shown(text)} names a descriptor of the worker; dial the port that it is bound to")
    return endpoint


def _split(rest: str) -> tuple[str, str | None]:
    """Splits a text at the @ before another transport; paths may contain @."""
    for position in (match.start() for match in re.finditer("@", rest)):
        if _SCHEME.match(rest, position + 1):
            return rest[:position], rest[position + 1 :]
    return rest, None


def _endpoint(text: str, address: str, *, binds: bool) -> ChannelEndpoint:
    match = _SCHEME.match(text)
    assert match is not None
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme == "ipc":
        if not rest or rest.startswith("@"):
            problem = "sockets without a file have no owner or mode to be checked" if rest else "it names no path"
            raise AddressError(f"{_shown(address)}: {problem}; write ipc:///a/path")
        return ChannelEndpoint("ipc", path=rest)
    if scheme == "tcp":
        return _tcp(rest, address, binds=binds)
    if scheme in ("tls", "metatls", "inproc", "unix"):
        raise NotImplementedError(f"{scheme}:// is not part of this version; use tcp:// with a key, or ipc:// here")
    raise AddressError(f"{_shown(address)}: {scheme}:// is not a known transport; {_FORMS}")


def _tcp(rest: str, address: str, *, binds: bool) -> ChannelEndpoint:
    host, colon, number = rest.rpartition(":")
    if rest == "*" and not binds:
        raise NotImplementedError(
            "tcp://* does not say under which name others reach this host, nor its port; write "
            "tcp://its-name:22222@tcp://0.0.0.0:22222"
        )
    fd = int(number[2:]) if _DESCRIPTOR.fullmatch(number) else None
    if fd is not None:
        number = "0"
    if not colon or not (number.isascii() and number.isdigit() and len(number) <= 5 and int(number) <= 65535):
        raise AddressError(f"{_shown(address)}: tcp:// needs a host and a port from 1 to 65535")
    port = int(number)
    if host == "*":
        if not binds:
            raise NotImplementedError(
                f"tcp://* does not say under which name others reach this host; write "
                f"tcp://its-name:{port}@tcp://0.0.0.0:{port}"
            )
        host = "0.0.0.0"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        good = ":" in host and _V6.fullmatch(host) is not None
    else:
        good = len(host) <= 255 and _NAME.fullmatch(host) is not None
    if not good:
        raise AddressError(
            f"{_shown(address)}: {_shown(host)} is neither a host name nor an IP address ([...] for IPv6)"
        )
    if port == 0 and fd is None and not binds:
        raise AddressError(f"{_shown(address)}: nobody can dial port 0; choose one")
    return ChannelEndpoint("tcp", host=host, port=port, fd=fd)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")
