"""Links under hundreds of random interleavings: at most once, in order, nothing lost without a name."""

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch_nb.routing import Deliver, Failed, Link, LinkConfig, Transmit
from monarch_nb.testing import MemoryNetwork, NetworkFaults, VirtualClock
from tests.effort import tries

pytestmark = pytest.mark.timeout(120)

CONFIG = LinkConfig(window=64 << 10, gap_timeout=5.0, ack_frames=7)


class TwoLinks(RuleBasedStateMachine):
    """Two nodes, one connection; the machine chooses which frame arrives next, twice, or never."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.incarnations = 1
        self.links = {"a": self.link(True), "b": self.link(False)}
        self.flying = {"a": [], "b": []}  # frames on their way to ...
        self.connected = True
        self.sent = {"a": [], "b": []}
        self.got = {"a": [], "b": []}  # (incarnation of the receiver, item)
        self.failed = {"a": [], "b": []}
        self.copies = []  # frames that arrived and will again; no copy outlives its connection
        self.restarts = 0
        self.items = 0
        self.do("a", self.links["a"].connected(0.0))

    def link(self, dials):
        self.incarnations += 1
        return Link(self.incarnations, dials=dials, config=CONFIG)

    def do(self, end, actions):
        peer = "b" if end == "a" else "a"
        for action in actions:
            if isinstance(action, Transmit):
                if self.connected:
                    self.flying[peer].append((action.prefix, action.item))
            elif isinstance(action, Deliver):
                self.deliver(end, action.item, action.charge)
            elif isinstance(action, Failed):
                self.failed[end] += action.items

    def deliver(self, end, item, charge):
        link = self.links[end]
        self.got[end].append((link.incarnation, item))
        prefix = link.consumed(charge, link.peer_incarnation)
        if prefix:
            self.do(end, [Transmit(prefix, None)])

    def arrive(self, end, prefix, item):
        outcome = self.links[end].received(prefix, item, 2000, self.now)
        if isinstance(outcome, list):
            self.do(end, outcome)
        elif outcome >= 0:
            self.deliver(end, item, outcome)

    @rule(end=st.sampled_from("ab"), count=st.integers(1, 5))
    def send(self, end, count):
        link = self.links[end]
        for _ in range(count):
            if (end == "b" and not link.peer_incarnation) or link.blocked(2000):
                return
            item = (link.incarnation, self.items)
            self.items += 1
            self.sent[end].append(item)
            prefix = link.send(item, 2000)
            if prefix:
                self.do(end, [Transmit(prefix, item)])

    @rule(end=st.sampled_from("ab"), count=st.integers(1, 20))
    def arrive_in_order(self, end, count):
        for _ in range(min(count, len(self.flying[end]))):
            self.arrive(end, *self.flying[end].pop(0))

    @rule(end=st.sampled_from("ab"), pick=st.integers(0, 1 << 20))
    def arrive_out_of_order(self, end, pick):
        if self.flying[end]:
            self.arrive(end, *self.flying[end].pop(pick % len(self.flying[end])))

    @rule(end=st.sampled_from("ab"), pick=st.integers(0, 1 << 20))
    def arrive_and_stay(self, end, pick):
        if self.flying[end]:
            frame = self.flying[end][pick % len(self.flying[end])]
            self.copies.append(frame)
            self.arrive(end, *frame)

    @rule(end=st.sampled_from("ab"), pick=st.integers(0, 1 << 20))
    def lose(self, end, pick):
        if self.flying[end]:
            self.flying[end].pop(pick % len(self.flying[end]))

    @rule(seconds=st.sampled_from([0.02, 0.5, 3.0]))
    def wait(self, seconds):
        self.now += seconds
        for end, link in self.links.items():
            if not link.idle:
                self.do(end, link.tick(self.now))

    @precondition(lambda self: self.connected)
    @rule(keep=st.booleans())
    def disconnect(self, keep):
        self.connected = False
        for end, link in self.links.items():
            self.do(end, link.disconnected(self.now))
            late = [frame for frame in self.flying[end] if not any(frame is copy for copy in self.copies)]
            self.flying[end][:] = late if keep else []  # what had not arrived may still come out of a buffer

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self):
        self.connected = True
        self.do("a", self.links["a"].connected(self.now))

    @rule(end=st.sampled_from("ab"))
    def bury(self, end):
        """It is told that its peer has ended, whether that is so or not."""
        if self.connected:
            self.disconnect(False)
        self.do(end, self.links[end].bury("it is lost", self.now))

    @precondition(lambda self: self.restarts < 4)
    @rule(end=st.sampled_from("ab"))
    def restart(self, end):
        self.restarts += 1
        was = self.connected
        if was:
            self.disconnect(True)
        self.links[end] = self.link(end == "a")
        if was or end == "a":
            self.connect()

    @invariant()
    def at_most_once_in_order(self):
        for end, peer in (("a", "b"), ("b", "a")):
            for incarnation in {incarnation for incarnation, _ in self.got[end]}:
                numbers = [item for life, item in self.got[end] if life == incarnation]
                assert numbers == sorted(set(numbers))
            everything = [item for _, item in self.got[end]]
            assert len(everything) == len(set(everything)), "delivered to two lives"
            assert set(everything) <= set(self.sent[peer])

    def teardown(self):
        if not self.connected:
            self.connect()
        for _ in range(4000):
            self.arrive_in_order("a", len(self.flying["a"]))
            self.arrive_in_order("b", len(self.flying["b"]))
            self.wait(0.02)
            if all(link.idle for link in self.links.values()) and not any(self.flying.values()):
                break
        self.at_most_once_in_order()
        for end, peer in (("a", "b"), ("b", "a")):
            link = self.links[end]
            assert link.unacked == 0, "it never came to rest"
            outcomes = {item for _, item in self.got[peer]} | set(self.failed[end])
            items = [item for item in self.sent[end] if item[0] == link.incarnation]  # a dead sender names nothing
            assert set(items) <= outcomes, "lost without a name"
            assert not link.blocked(2000)


TestTwoLinks = TwoLinks.TestCase
TestTwoLinks.settings = settings(max_examples=tries(200), stateful_step_count=60)
TestTwoLinks.pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


class Traffic:
    """Random traffic among a few nodes; checks per direction of a pair."""

    def __init__(self, seed, faults, nodes=3):
        self.random = random.Random(seed)
        self.network = MemoryNetwork(
            VirtualClock(), seed=seed, faults=faults, config=LinkConfig(window=64 << 10, ack_frames=7)
        )
        self.names = [f"h{number}/agent" for number in range(nodes)]
        self.nodes, self.incarnations = {}, defaultdict(int)
        self.sent = []
        self.got = defaultdict(list)
        self.failed = set()
        for name in self.names:
            self.join(name)

    def join(self, name):
        self.incarnations[name] += 1
        key = (name, self.incarnations[name])
        self.nodes[name] = self.network.join(
            name, lambda src, item: self.got[key].append(item), lambda dst, reason, items: self.failed.update(items)
        )

    def send(self):
        src, dst = self.random.sample(self.names, 2)
        lane = self.random.choice([0, 0, 0, 1])
        item = (src, self.incarnations[src], dst, lane, len(self.sent))
        self.sent.append(item)
        self.nodes[src].send(dst, item, self.random.choice([10, 3000, 100_000]), lane=lane)

    def check(self):
        everything = [item for items in self.got.values() for item in items]
        assert len(everything) == len(set(everything))
        outcomes = set(everything) | self.failed
        for item in self.sent:
            if self.incarnations[item[0]] == item[1]:
                assert item in outcomes, "lost without a name"


@pytest.mark.parametrize("seed", range(tries(40)))
def test_a_lossy_network_delivers_everything_once_to_living_nodes(seed):
    faults = NetworkFaults(drop=0.1, duplicate=0.1, reorder=0.1)
    traffic = Traffic(seed, faults)
    for _ in range(150):
        for _ in range(traffic.random.randrange(4)):
            traffic.send()
        traffic.network.clock.advance(traffic.random.choice([0.0, 0.001, 0.05]))
    assert traffic.network.clock.settle(600)
    traffic.check()
    assert not traffic.failed


@pytest.mark.parametrize("seed", range(tries(60)))
def test_cuts_and_restarts_lose_nothing_without_a_name(seed):
    traffic = Traffic(seed, NetworkFaults(drop=0.02, duplicate=0.05, reorder=0.05))
    dice, network = traffic.random, traffic.network
    for _ in range(150):
        for _ in range(dice.randrange(4)):
            traffic.send()
        network.clock.advance(dice.choice([0.0, 0.001, 0.05]))
        match dice.randrange(20):
            case 0:
                network.flap(*dice.sample(traffic.names, 2))
            case 1:
                pair = dice.sample(traffic.names, 2)
                network.cut(*pair)
                network.clock.later(dice.choice([0.01, 1.0]), lambda pair=pair: network.mend(*pair))
            case 2:
                name = dice.choice(traffic.names)
                network.kill(name)
                traffic.join(name)
    assert network.clock.settle(900)
    traffic.check()


@pytest.mark.parametrize("seed", range(tries(10)))
def test_without_restarts_reconnecting_loses_nothing_at_all(seed):
    traffic = Traffic(seed, NetworkFaults())
    for name in traffic.names:  # everybody has heard of everybody
        for peer in traffic.names:
            if peer != name:
                traffic.nodes[name].send(peer, (name, 1, peer, 0, -1), 1)
    network = traffic.network
    network.clock.advance(1.0)
    for _ in range(300):
        traffic.send()
        if traffic.random.random() < 0.1:
            network.flap(*traffic.random.sample(traffic.names, 2))
        network.clock.advance(traffic.random.choice([0.0, 0.001, 0.3]))
    assert network.clock.settle(600)
    traffic.check()
    assert not {item for item in traffic.failed if item[3] == 0}


def test_a_stopped_peer_is_asked_rarely_and_fails_nothing():
    network = MemoryNetwork(seed=1)
    got, failed = [], []
    a = network.join("h0/agent", failed=lambda dst, reason, items: failed.extend(items))
    b = network.join("h1/agent", lambda src, item: got.append(item))
    a.send("h1/agent", 0, 10)
    network.clock.advance(1.0)
    b.reads = False
    before = network.frames
    for number in range(1, 6):
        a.send("h1/agent", number, 10)
    network.clock.advance(600.0)
    assert network.frames - before < 80
    assert not failed
    b.resume()
    network.clock.advance(30.0)
    assert got == [0, 1, 2, 3, 4, 5]


def test_an_application_that_takes_nothing_blocks_its_sender_until_it_reads():
    network = MemoryNetwork(config=LinkConfig(window=100 << 10))
    got = []
    a = network.join("h0/agent")
    b = network.join("h1/agent", lambda src, item: got.append(item))
    b.takes = False
    for number in range(1000):
        a.send("h1/agent", number, 10_000)
    network.clock.advance(10.0)
    assert len(got) == 10
    assert a.queued("h1/agent") == 990
    b.takes = True
    b.take()
    network.clock.advance(60.0)
    assert got == list(range(1000))


def test_the_same_seed_gives_the_same_run():
    def run(seed):
        traffic = Traffic(seed, NetworkFaults(drop=0.1, duplicate=0.1, reorder=0.1))
        for _ in range(100):
            traffic.send()
            traffic.network.clock.advance(0.01)
        traffic.network.clock.settle(600)
        return traffic.network.frames, traffic.network.clock.now, dict(traffic.got)

    assert run(3) == run(3)
    assert run(3) != run(4)
