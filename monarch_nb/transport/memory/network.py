"""A network in memory on a virtual clock: real links, no sockets, and all kinds of faults, from a seed."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from monarch_nb.routing.actions import Action, Deliver, Failed, LinkConfig, LinkState, Transmit, Unblocked
from monarch_nb.routing.link import Link
from monarch_nb.transport.memory.clock import VirtualClock
from monarch_nb.wire import Lane, host_of


@dataclass(slots=True)
class NetworkFaults:
    """Faults of the network: probabilities per frame, and seconds. May be changed while it runs."""

    delay: tuple[float, float] = (0.0001, 0.001)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # such a frame may arrive up to 20 delays late; the others keep their order
    lag: dict[int, float] = field(default_factory=dict)  # seconds by lane, beyond the delay
    bandwidth: float = 0.0  # bytes per second from a host, and to a host; 0: unlimited


_DOWN_TICK_S = 0.5  # a link that is down only checks for how long

_Item = tuple[object, int] | None  # item and size; None for a frame of the link itself
_Wire = tuple[str, str, int]  # dialling process, dialled process, lane


@dataclass(slots=True)
class _End:
    """One node's end of one connection."""

    link: Link[_Item]
    peer: str
    wire: _Wire
    tick_at: float | None = None  # time of the link's next tick
    waiting: list[tuple[object, int]] = field(default_factory=list)  # sends that wait for credits


class MemoryNode:
    """A process on the network. `received(src, item)` and `failed(dst, reason, items)` are called as time passes."""

    def __init__(
        self,
        network: "MemoryNetwork",
        address: str,
        received: Callable[[str, Any], object],
        failed: Callable[[str, str, list[Any]], object],
    ) -> None:
        self.address = address
        self.alive = True
        self.reads = True  # False: a stopped process, for which frames wait
        self.takes = True  # False: the application takes nothing, so no credits return (see `take`)
        self._network = network
        self._received = received
        self._failed = failed
        self._ends: dict[_Wire, _End] = {}
        self._untaken: list[tuple[_End, int, int]] = []
        self._door: list[tuple[_Wire, bytes, _Item, int]] = []

    def send(self, dst: str, item: object, size: int = 0, *, lane: int = 0, exempt: bool = False) -> None:
        """Sends on the link to `dst`, dialling if there is none; waits for credits in a queue, never blocks."""
        if not self.alive:
            raise ValueError(f"{self.address} was killed")
        end = self._end_to(dst, lane)
        if not exempt and (end.waiting or end.link.blocked(size)):
            end.waiting.append((item, size))
        else:
            self._write(end, item, size, exempt)

    def bury(self, peer: str, reason: str) -> None:
        """Records the end of a process or host: its unacknowledged items fail, and a new one may follow."""
        wires = tuple(self._ends)
        if "/" in peer:  # one process of possibly very many
            wires = tuple(wire for lane in Lane for wire in ((self.address, peer, lane), (peer, self.address, lane)))
        for wire in wires:
            end = self._ends.get(wire)
            if end is not None and (end.peer == peer or host_of(end.peer) == peer):
                waiting = [item for item, _ in end.waiting]
                self._do(end, end.link.bury(reason, self._network.clock.now))
                del self._ends[wire]
                if waiting:
                    self._failed(end.peer, reason, waiting)

    def take(self) -> None:
        """Takes all items that were delivered while `takes` was False."""
        untaken, self._untaken = self._untaken, []
        for end, charge, incarnation in untaken:
            self._consumed(end, charge, incarnation)

    def resume(self) -> None:
        """Reads again, beginning with the waiting frames."""
        self.reads = True
        door, self._door = self._door, []
        for wire, prefix, item, size in door:
            self._arrived(wire, prefix, item, size)

    def links(self) -> Iterable[Link[_Item]]:
        """Returns the links of this node."""
        return [end.link for end in self._ends.values()]

    def queued(self, dst: str) -> int:
        """Returns the number of sends to `dst` that wait for credits."""
        return sum(len(end.waiting) for end in self._ends.values() if end.peer == dst)

    def _end_to(self, dst: str, lane: int) -> _End:
        for wire in ((self.address, dst, lane), (dst, self.address, lane)):
            end = self._ends.get(wire)
            if end is not None and (wire[0] == self.address or end.link.state is LinkState.UP):
                return end
        wire = (self.address, dst, lane)
        end = self._ends[wire] = self._network._end(wire, dst, dials=True)
        self._do(end, end.link.connected(self._network.clock.now))
        if not self._network.reachable(self.address, dst):
            self._broke(wire)
        return end

    def _write(self, end: _End, item: object, size: int, exempt: bool) -> None:
        prefix = end.link.send((item, size), size, exempt)
        if prefix is not None:
            self._network._carry(self, end, prefix, (item, size), size)
        self._keep_ticking(end)

    def _arrived(self, wire: _Wire, prefix: bytes, item: _Item, size: int) -> None:
        if not self.alive:
            return
        if not self.reads:
            self._door.append((wire, prefix, item, size))
            return
        end = self._ends.get(wire)
        if end is None:
            if wire[0] == self.address:
                return  # an answer to a link of a former incarnation
            end = self._ends[wire] = self._network._end(wire, wire[0], dials=False)
        outcome = end.link.received(prefix, item, size, self._network.clock.now)
        if isinstance(outcome, int):
            if outcome >= 0:
                self._deliver(end, item, outcome)
        else:
            self._do(end, outcome)
        self._keep_ticking(end)

    def _do(self, end: _End, actions: list[Action[_Item]]) -> None:
        for action in actions:
            match action:
                case Transmit():
                    self._network._carry(self, end, action.prefix, action.item, action.item[1] if action.item else 0)
                case Deliver():
                    self._deliver(end, action.item, action.charge)
                case Failed():
                    self._failed(end.peer, action.reason, [item[0] for item in action.items if item is not None])
                case Unblocked():
                    while end.waiting and not end.link.blocked(end.waiting[0][1]):
                        item, size = end.waiting.pop(0)
                        self._write(end, item, size, False)
                case _:
                    pass

    def _deliver(self, end: _End, item: _Item, charge: int) -> None:
        assert item is not None
        incarnation = end.link.peer_incarnation
        if self.takes:
            self._consumed(end, charge, incarnation)
        else:
            self._untaken.append((end, charge, incarnation))
        self._received(end.peer, item[0])

    def _consumed(self, end: _End, charge: int, incarnation: int) -> None:
        prefix = end.link.consumed(charge, incarnation)
        if prefix is not None:
            self._network._carry(self, end, prefix, None, 0)
        self._keep_ticking(end)

    def _broke(self, wire: _Wire) -> None:
        end = self._ends.get(wire)
        if end is None or end.link.state is LinkState.DOWN:
            return
        self._do(end, end.link.disconnected(self._network.clock.now))
        self._keep_ticking(end)
        if wire[0] == self.address:
            self._network.clock.later(self._network.redial, lambda: self._redial(end))

    def _redial(self, end: _End) -> None:
        if not self.alive:
            return
        if self._network.reachable(self.address, end.peer):
            self._do(end, end.link.connected(self._network.clock.now))
            self._keep_ticking(end)
        else:
            self._network._redial_later(self, end)

    def _keep_ticking(self, end: _End) -> None:
        if not self.alive or end.link.idle:
            return
        pause = _DOWN_TICK_S if end.link.state is LinkState.DOWN else self._network.config.tick
        when = self._network.clock.now + pause
        if end.tick_at is None or when < end.tick_at:
            end.tick_at = when
            self._network.clock.later(pause, lambda: self._tick(end, when))

    def _tick(self, end: _End, when: float) -> None:
        if end.tick_at != when:  # an earlier tick has replaced it
            return
        end.tick_at = None
        if self.alive and self.reads:
            self._do(end, end.link.tick(self._network.clock.now))
        self._keep_ticking(end)


class MemoryNetwork:
    """Joins nodes by links. Deterministic: the same seed and the same calls give the same run."""

    def __init__(
        self,
        clock: VirtualClock | None = None,
        *,
        seed: int = 0,
        faults: NetworkFaults | None = None,
        config: LinkConfig | None = None,
        redial: float = 0.1,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.faults = faults or NetworkFaults()
        self.config = config or LinkConfig()
        self.redial = redial  # seconds between attempts to connect
        self.frames = 0  # transmitted so far
        self._random = random.Random(seed)
        self._nodes: dict[str, MemoryNode] = {}
        self._hosts: set[str] = set()  # hosts
        self._cuts: set[frozenset[str]] = set()
        self._partitions: set[frozenset[str]] = set()  # pairs of hosts
        self.travelling = 0  # frames in flight
        self._generation: dict[_Wire, int] = {}  # of the connection: a cut loses frames in flight
        self._last: dict[tuple[_Wire, str], float] = {}  # arrival of the last frame, per direction
        self._free: dict[tuple[str, bool], float] = {}  # the time at which transmission from (True) or to a host ends
        self._redials: dict[frozenset[str], list[tuple[MemoryNode, _End]]] = {}
        self._link_incarnations = count(1)
        self._wires: dict[str, set[_Wire]] = {}  # by the processes at their ends

    def join(
        self,
        address: str,
        received: Callable[[str, Any], object] = lambda src, item: None,
        failed: Callable[[str, str, list[Any]], object] = lambda dst, reason, items: None,
    ) -> MemoryNode:
        """Adds a process at `address`; a new incarnation if one was killed there."""
        if address in self._nodes and self._nodes[address].alive:
            raise ValueError(f"{address} is taken")
        node = self._nodes[address] = MemoryNode(self, address, received, failed)
        self._hosts.add(host_of(address))
        self._mended(lambda pair: address in pair)
        return node

    def kill(self, address: str) -> None:
        """Ends a process at once; its connections break, and frames in flight are lost."""
        self._nodes[address].alive = False
        self._break(self._wires.pop(address, set()))

    def cut(self, first: str, second: str) -> None:
        """Breaks the connections of two nodes; they cannot connect again until `mend`."""
        self._cuts.add(frozenset((first, second)))
        self._break({wire for wire in self._wires.get(first, ()) if second in wire[:2]})

    def mend(self, first: str, second: str) -> None:
        """Lets two nodes connect again."""
        pair = frozenset((first, second))
        self._cuts.discard(pair)
        self._mended(lambda other_pair: other_pair == pair)

    def part_hosts(self, first: str, second: str) -> None:
        """Breaks all connections between two hosts, also for processes that begin later, until `join_hosts`."""
        self._partitions.add(frozenset((first, second)))
        wires = {wire for wires in self._wires.values() for wire in wires}
        self._break({wire for wire in wires if {host_of(wire[0]), host_of(wire[1])} == {first, second}})

    def join_hosts(self, first: str, second: str) -> None:
        """Lets two hosts connect again."""
        hosts = frozenset((first, second))
        self._partitions.discard(hosts)
        self._mended(lambda pair: frozenset(map(host_of, pair)) == hosts)

    def flap(self, first: str, second: str) -> None:
        """Breaks the connections of two nodes, which reconnect at the next attempt."""
        self.cut(first, second)
        self.mend(first, second)

    def reachable(self, first: str, second: str) -> bool:
        """Returns whether a connection could be made."""
        node = self._nodes.get(second)
        return node is not None and node.alive and not self._apart(first, second)

    def has_host(self, host: str) -> bool:
        """Returns whether a process of this host has ever joined."""
        return host in self._hosts

    def _apart(self, first: str, second: str) -> bool:
        if frozenset((first, second)) in self._cuts:
            return True
        return bool(self._partitions) and frozenset((host_of(first), host_of(second))) in self._partitions

    # implementation

    def _end(self, wire: _Wire, peer: str, *, dials: bool) -> _End:
        for address in wire[:2]:
            self._wires.setdefault(address, set()).add(wire)
        return _End(Link(next(self._link_incarnations), lane=wire[2], dials=dials, config=self.config), peer, wire)

    def _carry(self, node: MemoryNode, end: _End, prefix: bytes, item: _Item, size: int) -> None:
        self.frames += 1
        faults, wire = self.faults, end.wire
        if not self.reachable(node.address, end.peer) or self._random.random() < faults.drop:
            return
        generation = self._generation.get(wire, 0)
        for _ in range(2 if self._random.random() < faults.duplicate else 1):
            delay = self._random.uniform(*faults.delay) + faults.lag.get(wire[2], 0.0)
            way = (wire, end.peer)
            when = max(self._through(node.address, end.peer, size, delay), self._last.get(way, 0.0))
            if self._random.random() < faults.reorder:
                when += self._random.uniform(0, 20 * faults.delay[1])
            else:
                self._last[way] = when
            peer = self._nodes[end.peer]
            self.travelling += 1

            def arrive(peer: MemoryNode = peer) -> None:
                self.travelling -= 1
                if self._generation.get(wire, 0) == generation:
                    peer._arrived(wire, prefix, item, size)

            self.clock.later(when - self.clock.now, arrive)

    def _through(self, src: str, dst: str, size: int, delay: float) -> float:
        """Returns the arrival time of a frame, which follows earlier frames from its host and to its target."""
        now, bandwidth = self.clock.now, self.faults.bandwidth
        source, target = host_of(src), host_of(dst)
        if not bandwidth or source == target:
            return now + delay
        took = size / bandwidth
        departure = self._free[source, True] = max(now, self._free.get((source, True), 0.0)) + took
        arrival = self._free[target, False] = max(departure + delay, self._free.get((target, False), 0.0) + took)
        return arrival

    def _break(self, wires: set[_Wire]) -> None:
        for wire in sorted(wires):
            self._generation[wire] = self._generation.get(wire, 0) + 1
            for address in wire[:2]:
                node = self._nodes.get(address)
                if node is not None and node.alive:
                    node._broke(wire)

    def _redial_later(self, node: MemoryNode, end: _End) -> None:
        self._redials.setdefault(frozenset((node.address, end.peer)), []).append((node, end))

    def _mended(self, matches: Callable[[frozenset[str]], bool]) -> None:
        for pair in [pair for pair in self._redials if matches(pair) and not self._apart(*sorted(pair))]:
            for node, end in self._redials.pop(pair):
                self.clock.later(self.redial, partial(node._redial, end))
