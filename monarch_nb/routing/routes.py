"""Routes from one process to all others. Pure bookkeeping."""

from typing import Literal

from msgspec import Struct

from monarch_nb.wire import agent_of, host_of, parse_address

HopKind = Literal["self", "ipc", "tcp", "inbound", "agent"]


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
