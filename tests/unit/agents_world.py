"""Two agents that dial each other, die and are started anew: real links on a simulated network and clock.

Random: when connections open and break, which messages under way arrive, when a death is learnt of, and by whom. As in
the real world: a dialler learns at once that its connection is open or broken, a listener only when it writes; frames
of one connection keep their order.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.routing import LinkConfig, LinkIncarnations
from monarch_nb.transport import tcp
from monarch_nb.transport.errors import NotConnectedError
from monarch_nb.transport.links import Links
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.tcp.endpoints import Limits
from monarch_nb.transport.tcp.sockets import DialledChannel, InboundChannel
from monarch_nb.wire.header import Header, Kind

TICK = 0.02


class Wire:
    """One connection: two queues, until it breaks."""

    def __init__(self, dealer: "Dealer", listener: "Agent") -> None:
        self.dealer, self.listener = dealer, listener
        self.out: deque[tuple[bytes, Sequence[Any]]] = deque()
        self.back: deque[tuple[bytes, Sequence[Any]]] = deque()
        self.intact = True


class Dealer(DialledChannel):
    """A dialled socket, which connects by itself, again and again."""

    def __init__(self, agent: "Agent", peer: Any, name: bytes) -> None:
        self.agent, self.peer, self.name = agent, peer, name
        self.wire: Wire | None = None
        self.open = True
        agent.world.dealers.append(self)

    def listen(self, callback: Callable[[], bool]) -> None:
        pass

    def write(self, frame0: bytes, frames: Sequence[Any]) -> None:
        if self.wire is None or not self.wire.intact:
            raise NotConnectedError
        self.wire.out.append((frame0, frames))

    def read(self) -> None:
        return None

    def close(self, linger_ms: int) -> None:
        self.open = False
        self.agent.world.dealers.remove(self)
        if self.wire is not None:
            self.agent.world.breaks(self.wire)


class Back(InboundChannel):
    """The way back over a connection that the peer has dialled."""

    def __init__(self, router: Any, routing_id: bytes, reader: Any, *, lost: Any, reroute: Any) -> None:
        self._wires, self._name = router, routing_id
        self._reader, self._reroute, self._closed = reader, reroute, False

    def write(self, frame0: bytes, frames: Sequence[Any]) -> None:
        wire = self._wires.get(self._name)
        if wire is None or not wire.intact:
            self._reader.call_soon(self._leave_it)
            raise NotConnectedError
        wire.back.append((frame0, frames))

    def close(self, linger_ms: int) -> None:
        self._closed = True


class Calls:
    """Stands in for the reading thread."""

    ident = 0

    def __init__(self) -> None:
        self.calls: deque[Any] = deque()
        self.ticking: list[Any] = []

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self.calls.append((function, args))

    def busy(self, peer: Any) -> None:
        self.ticking.append(peer)


class _Links(Links):
    def __init__(self, agent: "Agent", *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._agent = agent
        self._link_incarnations = LinkIncarnations(agent.incarnation)

    def dial(self, peer: Any) -> Dealer:
        return Dealer(self._agent, peer, f"{self.address}|{peer.lane}|{peer.incarnation:x}".encode())


class Agent:
    """One incarnation of an agent."""

    def __init__(self, world: "World", host: str, incarnation: int) -> None:
        self.world, self.host, self.incarnation = world, host, incarnation
        self.alive = True
        self.calls = Calls()
        self.wires: dict[bytes, Wire] = {}  # by routing id, as a ROUTER has them
        self.got: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.words: deque[Callable[[], None]] = deque()  # from the controller, in order
        config = LinkConfig(down_timeout=60.0, probe_after=1.0, tick=TICK)
        self.links = _Links(
            self, f"{host}/agent", None, self, reader=self.calls, keys=None, insecure_loopback=True, portable=True,
            config=config, limits=Limits(), on_connection=None,
        )  # fmt: skip

    def arrived(self, header: Header, parcel: Parcel) -> None:
        self.got.append(header.method)

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        self.failed.append((header.method, reason))

    def first_dial(self, address: str) -> None:
        pass

    def dropped(self, sender: str, reason: object) -> None:
        raise AssertionError(f"{sender}: {reason}")

    def lend(self, parcel: Parcel, to: str) -> int:
        return 0

    def shares_gpu(self, address: str) -> bool:
        return False

    def give_back(self, to: str, number: int) -> None:
        pass

    def send(self, to: str, text: str, lane: int) -> bool:
        """Whether the link took it."""
        header = Header(Kind.CONTROL, f"{to}/agent", self.links.address, method=text)
        try:
            self.links.to(header.dst, lane).send(header, Parcel([b""]), True)
        except RuntimeError:
            return False
        return True


class World:
    """Agents h1 and h2, and a controller that tells each about the other."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.incarnations = 0
        self.dealers: list[Dealer] = []
        self.wires: list[Wire] = []
        self.agents = {host: self._new_agent(host) for host in ("h1", "h2")}
        self.dead: list[Agent] = []

    def clock(self) -> float:
        return self.now

    def _new_agent(self, host: str) -> Agent:
        self.incarnations += 1
        return Agent(self, host, self.incarnations)

    def other(self, host: str) -> str:
        return "h2" if host == "h1" else "h1"

    def tell_back(self, host: str) -> None:
        """Tells the other agent that the present incarnation of this one is alive."""
        agent, receiver = self.agents[host], self.agents[self.other(host)]
        endpoint = f"tcp://127.0.0.1:{host[1:]}"
        receiver.words.append(lambda: receiver.links.learn(host, endpoint, None, "", (None, True), agent.incarnation))

    def tell_lost(self, host: str, incarnation: int) -> None:
        """Tells the other agent that an incarnation of this one has ended."""
        receiver = self.agents[self.other(host)]
        receiver.words.append(lambda: receiver.links.forget(host, f"incarnation {incarnation} is lost", incarnation))

    def restart(self, host: str) -> None:
        """The agent is killed; what it has written may still arrive."""
        old = self.agents[host]
        old.alive = False
        self.dead.append(old)
        for dealer in [dealer for dealer in self.dealers if dealer.agent is old]:
            self.dealers.remove(dealer)
        for wire in tuple(self.wires):
            if old in (wire.listener, wire.dealer.agent):
                late = self.dice.random() < 0.5
                (wire.back if wire.listener is old else wire.out).clear() if not late else None
                self.breaks(wire)
        self.agents[host] = self._new_agent(host)

    def breaks(self, wire: Wire) -> None:
        wire.intact = False

    def step(self) -> None:
        """One possible event happens."""
        match self.dice.randrange(6):
            case 0 | 1:
                if self.wires:
                    self._move(self.dice.choice(self.wires))
            case 2:
                if self.dealers:
                    self._connect(self.dice.choice(self.dealers))
            case 3:
                agent = self.agents[self.dice.choice(("h1", "h2"))]
                if agent.words:
                    agent.words.popleft()()
            case _:
                self._call(self.dice.choice(("h1", "h2")))

    def pass_time(self, seconds: float) -> None:
        """Every possible event happens, for this time."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(3):
                for agent in self.agents.values():
                    while agent.words:
                        agent.words.popleft()()
                    self._call(agent.host)
                for dealer in tuple(self.dealers):
                    self._connect(dealer)
                for wire in tuple(self.wires):
                    while wire in self.wires and (wire.out or wire.back or not wire.intact):
                        self._move(wire)
            self.tick()

    def tick(self) -> None:
        self.now += TICK
        for agent in self.agents.values():
            busy, agent.calls.ticking = agent.calls.ticking, []
            agent.calls.ticking += [peer for peer in busy if peer.tick(self.now)]

    def _call(self, host: str) -> None:
        calls = self.agents[host].calls.calls
        for _ in range(len(calls)):
            function, args = calls.popleft()
            function(*args)

    def _connect(self, dealer: Dealer) -> None:
        if dealer.wire is None and dealer.open:
            listener = self.agents[f"h{dealer.peer.endpoint.rpartition(':')[2]}"]
            wire = dealer.wire = Wire(dealer, listener)
            listener.wires[dealer.name] = wire
            self.wires.append(wire)
            dealer.agent.links._on_monitor_event(dealer.peer, tcp.UP, None)

    def _move(self, wire: Wire) -> None:
        """One message arrives, or, if there is none, the dialler learns that the connection is broken."""
        dealer, listener = wire.dealer, wire.listener
        ways = [way for way in (wire.out, wire.back) if way]
        if ways:
            way = self.dice.choice(ways)
            frame0, frames = way.popleft()
            if way is wire.out and listener.alive:
                peer = listener.links.incoming(listener.wires, dealer.name)  # type: ignore[arg-type]
                if peer is not None:
                    listener.links.receive(peer, [(frame0, frames)])
            elif way is wire.back and dealer.agent.alive and dealer.open:
                dealer.agent.links.receive(dealer.peer, [(frame0, frames)])
        elif not wire.intact:
            self.wires.remove(wire)
            if dealer.wire is wire:
                dealer.wire = None
                if dealer.agent.alive and dealer.open:
                    dealer.agent.links._on_monitor_event(dealer.peer, tcp.DOWN, None)
