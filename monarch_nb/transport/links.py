"""The peers of a process, the routes to them, and the sockets that are dialled."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.routing.routes import (
    Hop,
    Incarnations,
    LinkIncarnations,
    NoRoute,
    RoutingTable,
    agent_meant,
    first_link_incarnation,
    new_incarnation,
    process_incarnation,
)
from monarch_nb.transport import streams, tcp
from monarch_nb.transport.errors import TransportError, UnreachableError
from monarch_nb.transport.keys import Keys, KeyStep, require_keys
from monarch_nb.transport.peer import Peer
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import Message, UnixStream
from monarch_nb.transport.tcp.endpoints import Limits, checked_path
from monarch_nb.wire import Lane, agent_of, host_of, parse_address

if TYPE_CHECKING:
    from monarch_nb.transport.node import Node
    from monarch_nb.transport.tcp.sockets import Context, Socket

Connection = Callable[[str, bool, str], None]
Trust = tuple[Keys | None, bool]  # keys, and whether loopback may omit them


class Links:
    """All peers of one process. Thread-safe."""

    def __init__(
        self, address: str, agent: str | None, node: "Node", *, reader: Reader, keys: Keys | None,
        insecure_loopback: bool, portable: bool, config: LinkConfig, limits: Limits, on_connection: Connection | None,
    ) -> None:  # fmt: skip
        self.address = address
        self._context: Context | None = None
        self._inside: set[UnixStream] = set()  # connections to processes of this host
        self.arrived, self.undeliverable, self.dropped = node.arrived, node.undeliverable, node.dropped
        self.lend, self.give_back = node.lend, node.give_back
        self._first_dial, self.shares_gpu = node.first_dial, node.shares_gpu
        self._routes = RoutingTable(address, agent)
        self._reader = reader
        self._trust = (keys, insecure_loopback)
        self._trusts: dict[str, Trust] = {}  # of hosts with their own
        self._others: dict[bytes, Keys] = {}  # during a change of keys: alternatives, by refused public key
        self._portable, self._config, self._limits = portable, config, limits
        self._on_connection = on_connection
        self._peers: dict[tuple[str, int], Peer] = {}
        self._ways: dict[tuple[str, int], Peer] = {}
        self._by_id: dict[bytes, Peer] = {}
        self._ids: dict[Peer, bytes] = {}  # routing ids by peer
        self._link_incarnations = LinkIncarnations(new_incarnation())
        self._incarnations = Incarnations()
        self._lock = threading.RLock()
        self._closed = False

    # routes

    @property
    def incarnation(self) -> int:
        """The incarnation of this process's address."""
        return self._link_incarnations.incarnation

    def learn(
        self, target: str, endpoint: str | None, run_folder: Path | None, via: str | None, trust: Trust | None,
        incarnation: int = 0,
    ) -> None:  # fmt: skip
        """Records a route to a host or process; `incarnation` is its agent's. Raises TrustError without a key."""
        trust = trust if trust is not None and any(trust) else self._trust
        if endpoint is not None:
            require_keys(endpoint, *trust)
        with self._lock:
            if endpoint is not None:
                self._trusts[host_of(target)] = trust
            folder = None if run_folder is None else str(run_folder)
            self._routes.learn(target, endpoint=endpoint, run_folder=folder, via=via)
            self._ways.clear()
            if not target:
                return
            self._incarnations.back(target)
            agent = agent_meant(target)
            if agent:
                self._incarnations.back(agent, incarnation)
        if agent:
            self._renew(agent, incarnation)

    def _renew(self, agent: str, incarnation: int) -> None:
        """Renews the links to a living agent that have no route, or only know an earlier incarnation."""
        with self._lock:
            peers = self._of(agent)
            previous = [peer for peer in peers if 0 < process_incarnation(peer.last_seen) < incarnation]
            stale = [peer for peer in peers if peer in previous or peer.unreachable is not None or peer.awaits_redial]
            self._forget_ids(previous)
            if stale:
                self._routes.detached(agent)
            try:
                hop = self._routes.next_hop(agent)
            except NoRoute:
                hop = Hop("inbound", agent)
            endpoint = hop.endpoint if hop.address == agent else ""
            since = first_link_incarnation(self._incarnations.since(agent))
        for peer in previous:
            peer.bury("its agent was restarted")
        for peer in peers:
            peer.since(since)
            if peer in stale or (endpoint and peer.endpoint and peer.endpoint != endpoint):
                peer.revive(endpoint)

    def to(self, destination: str, lane: int) -> Peer:
        """Returns the peer that messages to this process are written to. Raises TransportError."""
        return self._ways.get((destination, lane)) or self._find(destination, lane)

    def _find(self, destination: str, lane: int) -> Peer:
        with self._lock:
            if self._closed:
                raise TransportError("this process has closed its connections")
            try:
                hop = self._routes.next_hop(destination)
            except NoRoute as error:
                host = host_of(destination)
                ended = self._incarnations.ended.get(host) or self._incarnations.ended.get(agent_of(host))
                text = str(error) if ended is None else f"{destination} cannot be reached: {ended}"
                raise UnreachableError(text) from None
            for address in (destination, hop.address):
                if address in self._incarnations.ended:
                    raise UnreachableError(f"{destination} cannot be reached: {self._incarnations.ended[address]}")
            peer = self._peer(hop, lane)
            if len(self._ways) > 65536:
                self._ways.clear()
            self._ways[destination, lane] = peer
            if peer.endpoint and lane < 2 and self._elsewhere(hop):
                self.later(self._peer(hop, 1 - lane).begin)  # the peer may answer there, and cannot dial us
            return peer

    def begin(self, address: str) -> None:
        """Dials a process, or the next one on the way to it, before there are messages for it."""
        with contextlib.suppress(TransportError):
            self.to(address, Lane.DATA).begin()

    def _of(self, address: str) -> list[Peer]:
        return [peer for lane in Lane if (peer := self._peers.get((address, lane))) is not None]

    def _elsewhere(self, hop: Hop) -> bool:
        """Returns whether a process is on another host than this one, where this run folder is unknown."""
        return hop.endpoint.startswith("tcp:") or host_of(hop.address) != host_of(self.address)

    def _peer(self, hop: Hop, lane: int) -> Peer:
        key = (hop.address, lane)
        peer = self._peers.get(key)
        if peer is None:
            if hop.endpoint.startswith("ipc:"):
                checked_path(hop.endpoint)
                self.later(lambda: self._first_dial(hop.address))
            peer = self._peers[key] = Peer(
                self,
                hop.address,
                lane,
                hop.endpoint,
                self._link_incarnations.next(),
                portable=self._portable,
                config=self._config,
            )
            peer.since(first_link_incarnation(self._incarnations.since(hop.address)))
        return peer

    def incoming(self, router: "Socket", routing_id: bytes) -> Peer | None:
        """Returns the peer that sent a message to our TCP socket; None if it may not send."""
        identified = self._by_id.get(routing_id)
        if identified is not None:
            return identified
        peer = self._identify_peer(routing_id, tcp=True)
        if peer is not None:
            peer.attach(
                tcp.InboundChannel(
                    router, routing_id, self._reader, lost=peer.lost, reroute=lambda: self._on_inbound_closed(peer)
                )
            )
            if self._on_connection is not None:
                self._on_connection(peer.address, True, "it dialled")
        return peer

    def accept(self, connection: socket.socket) -> None:
        """Accepts a connection that a process of this host has dialled; reading thread."""
        caller: Peer | None = None
        named = False

        def received(messages: Sequence[Message]) -> None:
            nonlocal caller, named
            if not named:
                named = True
                caller = self._identify_peer(messages[0][0], tcp=False)
                if caller is not None:
                    caller.attach(stream)
                    for peer in self._of(caller.address):
                        peer.listens()
                messages = messages[1:]
            if caller is not None:  # else: late frames of an ended process
                self.receive(caller, messages)

        def lost() -> None:
            self._inside.discard(stream)
            if caller is not None and caller.cut(stream):
                self._on_inbound_closed(caller)

        stream = UnixStream(connection, self._reader, received, lost)
        self._inside.add(stream)
        stream.listen()

    def receive(self, peer: Peer, messages: Sequence[Message]) -> None:
        """Takes messages from a peer, of any kind; reading thread."""
        try:
            peer.receive(messages)
        except Exception as error:
            self.dropped(peer.address, f"{type(error).__name__}: {error}")

    def _identify_peer(self, routing_id: bytes, *, tcp: bool) -> Peer | None:
        try:
            address, lane, number = routing_id.decode().split("|")
            host, name, *_ = parse_address(address)
            key, incarnation = (address, int(lane)), int(number, 16)
            if not (host and name and "/" not in name and 0 <= key[1] < 256):
                raise ValueError("no address")
        except ValueError:
            self.dropped("an unknown process", "not an address of ours")
            return None
        with self._lock:
            if self._closed:
                return None
            if not self._incarnations.speaks(address, process_incarnation(incarnation)):
                return None
            self._routes.attached(address)
            peer = self._peers.get(key)
            if peer is None:
                hop = self._routes.next_hop(address)
                if hop.address != address:
                    hop = Hop("inbound", address)
                peer = self._peer(hop, key[1])
            self._forget_ids((peer,))
            self._by_id[routing_id], self._ids[peer] = peer, routing_id
            self._ways.clear()
            since = first_link_incarnation(self._incarnations.since(address))
        if peer.unreachable is not None:
            peer.since(since)
            peer.revive("")
        peer.connection.over_tcp = tcp
        return peer

    def _on_inbound_closed(self, peer: Peer) -> None:
        """Handles the end of a connection that the peer had dialled: it may redial, or this process does."""
        if peer.connection.over_tcp and self._on_connection is not None:
            self._on_connection(peer.address, False, "it closed the connection")
        with self._lock:
            endpoint = self._routes.dial_instead(peer.address)
            self._ways.clear()
        if endpoint:
            peer.redirect(endpoint)

    def connected(self, target: str) -> bool:
        """Returns whether the TCP connection of the urgent lane on the route to a process is up."""
        with self._lock:
            try:
                peer = self._peers.get((self._routes.next_hop(target).address, 1))
            except NoRoute:
                return False
        return peer is not None and peer.up

    def never_replied(self, address: str) -> bool:
        """Returns whether something was written to a process that has never replied."""
        with self._lock:
            peers = self._of(address)
        return not any(peer.last_seen for peer in peers) and not all(peer.settled for peer in peers)

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """Records the end of a process, or of a host with all its processes; `incarnation` is the agent's, if known.

        A later known incarnation of that agent stays.
        """
        agent = agent_meant(target)
        with self._lock:
            dead = self._of(target)
            if "/" not in target:  # else it is one process of possibly very many
                dead += [peer for peer in self._peers.values() if peer.address.startswith(f"{target}/")]
            last_seen: dict[str, int] = {address: 0 for address in (target, agent) if address}
            for peer in dead:
                last_seen[peer.address] = max(last_seen.get(peer.address, 0), process_incarnation(peer.last_seen))
            over = not agent or self._incarnations.lost(
                agent, incarnation or self._last(agent, last_seen), reason, last_seen[agent]
            )
            ended = [peer for peer in dead if peer.address != agent]
            if over:
                for address in last_seen:
                    if address != agent:
                        self._incarnations.lost(address, self._last(address, last_seen), reason)
                self._routes.forget(target)
                self._trusts.pop(target, None)
                for peer in ended:
                    del self._peers[peer.address, peer.lane]
                self._forget_ids(dead)
                self._ways.clear()
        if not over:
            self._renew(agent, incarnation + 1)
            return
        for peer in ended:
            peer.close(reason)
        for peer in dead:
            if peer.address == agent:  # its next incarnation finds the same link: one per own incarnation
                peer.bury(reason)
        if agent and agent not in self._incarnations.ended:  # it has sent frames meanwhile
            self._renew(agent, 0)

    def _forget_ids(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            routing_id = self._ids.pop(peer, b"")
            if self._by_id.get(routing_id) is peer:
                del self._by_id[routing_id]

    def _last(self, address: str, last_seen: dict[str, int]) -> int:
        """Returns the incarnation of a process that has just ended, as far as known here."""
        if last_seen[address] or not self._routes.near(address):
            return last_seen[address]
        return new_incarnation()  # by the clock of this machine: a process that dials later began later

    # change of keys

    def change_keys(self, step: KeyStep, old: Keys, new: Keys) -> None:
        """Takes one step of a change of keys; see `Node.change_keys`."""
        with self._lock:
            if step == "expect":
                self._others[old.public], self._others[new.public] = new, old
                return
            former, chosen = (new, old) if step == "cancel" else (old, new)
            self._trust = _renewed(self._trust, former, chosen)
            self._trusts = {host: _renewed(trust, former, chosen) for host, trust in self._trusts.items()}
            if step != "use":
                for keys in (old, new):
                    self._others.pop(keys.public, None)

    def cut_inbound(self) -> None:
        """Handles that connections which peers had dialled by TCP were closed: they dial again. Reading thread."""
        with self._lock:
            peers = [peer for peer in self._by_id.values() if peer.connection.over_tcp]
            self._forget_ids(peers)
        for peer in peers:
            if peer.has_dialled:
                peer.lost()
                self._on_inbound_closed(peer)

    def _refused(self, peer: Peer, keys: Keys | None) -> bool:
        """Handles that a peer refuses these keys; returns whether it is dialled with others."""
        host = host_of(peer.address)
        with self._lock:
            trust = self._trusts.get(host, self._trust)
            if keys is None or trust[0] is None:
                return False
            if keys == trust[0]:
                if keys.public not in self._others:
                    return False
                self._trusts[host] = (self._others[keys.public], trust[1])
        self.later(peer.redial)
        return True

    # requests of peers

    def dial(self, peer: Peer) -> "tcp.DialledChannel | UnixStream | None":
        """Opens a connection to the peer; None if that fails now. Raises DescriptorLimitError, TrustError."""
        if self._closed:
            return None
        name = f"{self.address}|{peer.lane}|{peer.incarnation:x}"
        if peer.endpoint.startswith("ipc:"):
            return self._dial_inside(peer, name)
        trust = self._trusts.get(host_of(peer.address), self._trust)
        require_keys(peer.endpoint, *trust)
        dealer = tcp.dial(self.context(), peer.endpoint, name, trust[0], self._limits)
        watcher = tcp.Monitor(dealer, self._reader, lambda event, _: self._on_monitor_event(peer, event, trust[0]))
        tcp.connect(dealer, peer.endpoint)
        return tcp.DialledChannel(dealer, self._reader, watcher)

    def _dial_inside(self, peer: Peer, name: str) -> UnixStream | None:
        connection = streams.dial(peer.endpoint.removeprefix("ipc://"), name.encode())
        if connection is None:
            return None

        def received(messages: Sequence[Message]) -> None:
            self.receive(peer, messages)

        def lost() -> None:
            self._inside.discard(stream)
            peer.cut(stream)

        stream = UnixStream(connection, self._reader, received, lost)
        self._inside.add(stream)
        return stream

    def context(self) -> "Context":
        """Returns the context of ZeroMQ sockets, created at first use: its threads serve connections to other hosts."""
        with self._lock:
            if self._context is None:
                self._context = tcp.new_context()
            return self._context

    def _on_monitor_event(self, peer: Peer, event: int, keys: Keys | None) -> None:
        if event == tcp.UP:
            peer.on_connected()
        elif event == tcp.DOWN:
            peer.lost()
        elif event & tcp.REFUSED and not self._refused(peer, keys):
            if self._on_connection is not None:
                self._on_connection(peer.address, False, "refused")
            else:
                self.dropped(peer.address, f"{peer.endpoint} did not accept our key, or is not a monarch-nb process")
        if self._on_connection is not None and event in (tcp.UP, tcp.DOWN):
            self._on_connection(peer.address, event == tcp.UP, "connected" if event == tcp.UP else "cut")

    def mark_busy(self, peer: Peer) -> None:
        """Ticks a peer from now on."""
        self._reader.busy(peer)

    def later(self, function: Callable[[], object]) -> None:
        """Calls a function on the reader thread."""
        self._reader.call_soon(function)

    def close(self, linger_ms: int) -> None:
        """Closes all connections; queued messages may leave within `linger_ms`."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
            self._ways.clear()
            self._by_id.clear()
            self._ids.clear()
        for peer in peers:
            peer.close("this process closed its connections", linger_ms)
        for stream in list(self._inside):
            stream.close(0)
        self._inside.clear()

    def destroy(self) -> None:
        """Destroys the context of the sockets, once all are closed."""
        if self._context is not None:
            self._context.destroy()

    @property
    def settled(self) -> bool:
        """True if every message was acknowledged by the next process on its route."""
        return all(peer.settled for peer in list(self._peers.values()))


def _renewed(trust: Trust, old: Keys, new: Keys) -> Trust:
    return (new, trust[1]) if trust[0] == old else trust
