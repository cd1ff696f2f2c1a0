"""Ways to other processes: addresses of workers as users write them, routes, and incarnations that have ended. Pure.

address  = [process-id "@"] endpoint ["@" endpoint]      (where to dial it, then where it binds)
endpoint = "tcp://" host ":" port | "tcp://" host ":fd" number | "ipc://" path

`fd` is a socket that the worker inherits and that is bound already: so the starter of workers can choose free
ports without a race.

The number of an incarnation is its start in milliseconds of its own machine's clock. The incarnations of its links
contain that number, so that a link knows the process that sent a frame, and a report that an incarnation has ended
affects no later one, however late it arrives.
"""

import itertools
import re
import time
from typing import Literal

from msgspec import Struct

from monarch_nb.wire import agent_of, host_of, parse_address

HopKind = Literal["self", "ipc", "tcp", "inbound", "agent"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_DESCRIPTOR = re.compile(r"fd[0-9]{1,7}", re.ASCII)
_PROCESS = re.compile(r"[^\s@/]+")
_LONGEST = 4096  # characters of an address of a worker
_FORMS = "known forms are tcp://host:port, ipc://path, tcp://host:port@tcp://0.0.0.0:port and process-id@tcp://..."
_LINKS_BITS = 22  # bits for the number of a link within an incarnation


# -- addresses of workers ----------------------------------------------------------------------------------------------


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


# -- routes ------------------------------------------------------------------------------------------------------------


class Hop(Struct, frozen=True):
    """The next process on a route: `address` names it, `endpoint` is where to dial it ("" when it is not dialled)."""

    kind: HopKind
    address: str
    endpoint: str = ""


class NoRoute(LookupError):
    """No route to a process is known."""


class RoutingTable:
    """Routes from one process to all others."""

    __slots__ = ("_agent", "_cache", "_default", "_endpoints", "_folders", "_inbound", "_self", "_vias")

    def __init__(self, address: str, agent: str | None = None) -> None:
        """`agent` is the process address of the agent for messages without a route; None for agents themselves."""
        self._self = address
        self._agent = agent if agent != address else None
        self._folders: dict[str, str] = {}
        self._endpoints: dict[str, str] = {}
        self._vias: dict[str, str] = {}
        self._default = ""
        self._inbound: set[str] = set()
        self._cache: dict[str, Hop] = {}

    def learn(
        self, target: str, *, endpoint: str | None = None, run_folder: str | None = None, via: str | None = None
    ) -> None:
        """Records a route to a host, or to one process ("host/name").

        It is reached by the TCP `endpoint` of its agent (or its own), by the `run_folder` of the host if it is on this
        machine, or through the process `via`, which has precedence ("": no longer). A later call replaces the earlier
        value of the same parameter. A route to "" by `via` is the default for all hosts without a known route.
        """
        if not target:
            self._default = via or ""
            self._cache.clear()
            return
        if endpoint is not None:
            self._endpoints[target] = endpoint
        if run_folder is not None:
            self._folders[target] = run_folder
        if via:
            self._vias[target] = via
        elif via is not None:
            self._vias.pop(target, None)
        self._cache.clear()

    def attached(self, address: str) -> None:
        """Records that a process has a live connection to this one, which it has dialled itself."""
        if address not in self._inbound:
            self._inbound.add(address)
            self._cache.clear()

    def detached(self, address: str) -> None:
        """Records the end of the connection that a process has dialled."""
        if address in self._inbound:
            self._inbound.discard(address)
            self._cache.clear()

    def dial_instead(self, address: str) -> str:
        """Records the end of a process's own connection; returns where to dial it, or "" (it will dial again)."""
        endpoint = self._endpoints.get(address, "")
        if not endpoint and parse_address(address).is_agent:
            endpoint = self._endpoints.get(host_of(address), "")
        if endpoint:
            self.detached(address)
        return endpoint

    def near(self, address: str) -> bool:
        """Returns whether a process is known to be on this machine."""
        return host_of(address) in self._folders

    def forget(self, target: str) -> None:
        """Removes a host with all its processes, or one process."""
        for routes in (self._endpoints, self._folders, self._vias):
            routes.pop(target, None)
        if "/" not in target:
            self._inbound = {address for address in self._inbound if not address.startswith(f"{target}/")}
        else:
            self._inbound.discard(target)
        self._cache.clear()

    def next_hop(self, destination: str) -> Hop:
        """Returns the next process on the route to "host/name". Raises NoRoute."""
        hop = self._cache.get(destination)
        if hop is None:
            if len(self._cache) > 65536:
                self._cache.clear()
            hop = self._cache[destination] = self._find(destination, ())
        return hop

    def _find(self, destination: str, visited: tuple[str, ...]) -> Hop:
        if destination == self._self:
            return Hop("self", destination)
        host = host_of(destination)
        via = self._vias.get(destination) or self._vias.get(host)
        if via is not None and via != destination and destination not in visited:
            return self._find(via, (*visited, destination))
        hop = self._direct(destination, host)
        if hop is None and self._agent is not None:
            agent = self._direct(self._agent, host_of(self._agent))
            if agent is not None:
                hop = Hop("agent", agent.address, agent.endpoint)
        if hop is None and self._default and not {destination, self._default} & {*visited}:
            return self._find(self._default, (*visited, destination))
        if hop is None:
            raise NoRoute(f"no route from {self._self} to {destination} is known")
        return hop

    def _direct(self, destination: str, host: str) -> Hop | None:
        folder = self._folders.get(host)
        if folder is not None:
            return Hop("ipc", destination, f"ipc://{folder}/{parse_address(destination).name}")
        if destination in self._endpoints:
            return Hop("tcp", destination, self._endpoints[destination])
        if destination in self._inbound:
            return Hop("inbound", destination)
        head = agent_of(host)
        if host in self._endpoints and head != self._self:
            return Hop("tcp", head, self._endpoints[host])
        if head in self._inbound:
            return Hop("inbound", head)
        return None


def agent_meant(text: str) -> str:
    """Returns the agent of a host or of an agent's address; "" for other processes."""
    address = parse_address(text)
    return agent_of(address.host) if address.is_agent or not address.name else ""


# -- incarnations ------------------------------------------------------------------------------------------------------


def new_incarnation() -> int:
    """Returns the number of an incarnation that begins now."""
    return time.time_ns() // 1_000_000


def process_incarnation(link: int) -> int:
    """Returns the incarnation of the process that has a link of this incarnation; 0 for 0."""
    return link >> _LINKS_BITS


def first_link_incarnation(incarnation: int) -> int:
    """Returns the smallest incarnation of links of a process and of later ones at its address."""
    return incarnation << _LINKS_BITS


class LinkIncarnations:
    """Incarnations for the links of one process: each larger than those before, and than all of earlier processes."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._count = itertools.count(first_link_incarnation(incarnation) + 1)

    def next(self) -> int:
        """Returns the incarnation of one more link. Thread-safe."""
        return next(self._count)


class Incarnations:
    """The known ends of other processes, by address and incarnation. Not thread-safe."""

    def __init__(self, remembered: int = 4096) -> None:
        self.ended: dict[str, str] = {}  # reasons, by address without a known living process
        self._over: dict[str, int] = {}  # the latest incarnation known to have ended
        self._remembered = remembered

    def lost(self, address: str, incarnation: int, reason: str, last_seen: int = 0) -> bool:
        """Ends an incarnation and earlier ones (0: unknown which). `last_seen` is the latest that sent a frame.

        Returns False if a later incarnation is known: the address stays as it is.
        """
        over = self._over.get(address, 0)
        if incarnation and (last_seen > incarnation or (over >= incarnation and address not in self.ended)):
            return False
        for ends in (self.ended, self._over):
            ends.pop(address, None)  # the latest last
            while len(ends) >= self._remembered:
                del ends[next(iter(ends))]
        self.ended[address] = reason
        self._over[address] = max(incarnation, over)
        return True

    def since(self, address: str) -> int:
        """Returns the earliest incarnation of a process that may still live."""
        return self._over.get(address, -1) + 1

    def back(self, address: str, incarnation: int = 0) -> None:
        """Records that a process lives at an address: this incarnation, if known."""
        self.ended.pop(address, None)
        self._over.pop(address, None)
        if incarnation:
            self._over[address] = incarnation - 1

    def speaks(self, address: str, incarnation: int) -> bool:
        """Returns whether to accept frames of an incarnation, which may have ended."""
        if incarnation < self.since(address):
            return False
        self.ended.pop(address, None)
        return True
