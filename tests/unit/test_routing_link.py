"""One pair of links by hand: every rule of the protocol on its own."""

import pytest

from monarch_nb.routing import (
    PREFIX,
    Acked,
    Deliver,
    Failed,
    Link,
    LinkConfig,
    LinkState,
    NewIncarnation,
    PrefixKind,
    Skipped,
    Transmit,
    Unblocked,
)

pytestmark = pytest.mark.timeout(20)


class Pair:
    """A dialler `a` and a listener `b` joined by two queues."""

    def __init__(self, config=None, lane=0):
        self.config = config or LinkConfig()
        self.now = 0.0
        self.a = Link(10, lane=lane, dials=True, config=self.config)
        self.b = Link(20, lane=lane, config=self.config)
        self.to_a, self.to_b = [], []
        self.got_a, self.got_b, self.events = [], [], []
        self.loses = set()  # items that never arrive
        self.do(self.a, self.a.connected(0.0))

    def queue(self, link):
        return self.to_b if link is self.a else self.to_a

    def send(self, link, item, size=10, **options):
        prefix = link.send(item, size, **options)
        if prefix is not None:
            self.queue(link).append((prefix, item, size))
        return prefix

    def do(self, link, actions):
        for action in actions:
            if isinstance(action, Transmit):
                self.queue(link).append((action.prefix, action.item, 10))
            elif isinstance(action, Deliver):
                (self.got_a if link is self.a else self.got_b).append(action.item)
                prefix = link.consumed(action.charge, link.peer_incarnation)
                if prefix:
                    self.queue(link).append((prefix, None, 0))
            else:
                self.events.append(action)

    def pump(self):
        while self.to_a or self.to_b:
            for link, queue in ((self.b, self.to_b), (self.a, self.to_a)):
                frames, queue[:] = queue[:], []
                for prefix, item, size in frames:
                    if item in self.loses:
                        continue
                    outcome = link.received(prefix, item, size, self.now)
                    if isinstance(outcome, list):
                        self.do(link, outcome)
                    elif outcome >= 0:
                        self.do(link, [Deliver(item, outcome)])

    def wait(self, seconds):
        for _ in range(round(seconds / self.config.tick)):
            self.now += self.config.tick
            for link in (self.a, self.b):
                if not link.idle:
                    self.do(link, link.tick(self.now))
            self.pump()

    def reconnect(self):
        self.a.disconnected(self.now)
        self.b.disconnected(self.now)
        self.to_a.clear()
        self.to_b.clear()

    def failed(self):
        return [item for action in self.events if isinstance(action, Failed) for item in action.items]


def kinds(queue):
    return [PREFIX.unpack_from(prefix)[0] for prefix, _, _ in queue]


def test_data_follows_the_first_hello_without_waiting_for_its_answer():
    pair = Pair()
    assert pair.send(pair.a, "x") is not None
    assert kinds(pair.to_b) == [PrefixKind.HELLO, PrefixKind.DATA]
    pair.pump()
    assert pair.got_b == ["x"]


def test_in_order_messages_take_the_fast_path_and_carry_their_charge():
    pair = Pair()
    pair.pump()
    prefix = pair.a.send("x", 5000)
    assert pair.b.received(prefix + b"header", "x", 5000, 0.0) == 5
    assert pair.b.received(pair.a.send("y", 0), "y", 0, 0.0) == 1
    assert pair.b.received(pair.a.send("z", 5000, exempt=True), "z", 5000, 0.0) == 0


def test_a_second_copy_is_dropped():
    pair = Pair()
    pair.pump()
    prefix = pair.a.send("x", 10)
    assert pair.b.received(prefix, "x", 10, 0.0) == 1
    assert pair.b.received(prefix, "x", 10, 0.0) == -1


def test_early_messages_wait_for_the_missing_one():
    pair = Pair()
    pair.pump()
    first, second, third = (pair.a.send(item, 10) for item in "xyz")
    assert pair.b.received(third, "z", 10, 0.0) == -1
    assert pair.b.received(second, "y", 10, 0.0) == -1
    assert pair.b.received(first, "x", 10, 0.0) == [Deliver("x", 1), Deliver("y", 1), Deliver("z", 1)]


def test_an_acknowledgement_follows_within_a_tick_and_empties_the_sender():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x")
    pair.pump()
    assert pair.a.unacked == 1
    pair.wait(0.02)
    assert pair.a.unacked == 0
    assert pair.a.idle
    assert pair.b.idle


def test_many_frames_are_acknowledged_without_a_tick():
    pair = Pair()
    pair.pump()
    for number in range(64):
        pair.send(pair.a, number)
    pair.pump()
    assert pair.a.unacked == 0


def test_a_big_frame_is_acknowledged_at_once():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x", 2 << 20)
    pair.pump()
    assert pair.a.unacked == 0


def test_held_items_are_named_when_the_peer_has_them():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "plain")
    pair.send(pair.a, "held", hold=True)
    pair.pump()
    pair.wait(0.02)
    assert pair.events == [Acked(["held"])]


def test_frames_lost_with_the_connection_are_resent_in_order():
    pair = Pair()
    pair.pump()
    for item in "abc":
        pair.send(pair.a, item)
    pair.reconnect()
    assert pair.send(pair.a, "d") is None
    pair.do(pair.a, pair.a.connected(pair.now))
    assert pair.send(pair.a, "e") is None
    pair.pump()
    assert pair.got_b == list("abcde")
    assert pair.a.state is LinkState.UP


def test_the_listener_resends_too():
    pair = Pair()
    pair.pump()
    pair.send(pair.b, "x")
    pair.reconnect()
    assert pair.send(pair.b, "y") is None
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.got_a == ["x", "y"]


def test_frames_that_arrived_before_a_break_are_not_delivered_twice():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x")
    pair.pump()
    pair.reconnect()
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.got_b == ["x"]
    assert pair.a.unacked == 0


def test_a_lost_tail_is_found_by_one_question():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x")
    pair.to_b.clear()
    pair.wait(1.5)
    assert pair.got_b == ["x"]


def test_questions_do_not_pile_up_at_a_silent_peer():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x")
    times = []
    for tick in range(6000):
        for action in pair.a.tick(tick * 0.02):
            times.append(tick * 0.02)
            assert isinstance(action, Transmit)
    assert 10 <= len(times) <= 16
    assert pair.a.unacked == 1


def test_a_restarted_peer_gets_nothing_old_and_the_failure_is_named():
    pair = Pair()
    pair.pump()
    for item in "ab":
        pair.send(pair.a, item)
    pair.pump()
    pair.wait(0.02)
    pair.send(pair.a, "c")
    pair.reconnect()
    pair.send(pair.a, "d")
    pair.b = Link(21, config=pair.config)
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    pair.send(pair.a, "e")
    pair.send(pair.b, "hi")
    pair.pump()
    assert pair.got_b == ["a", "b", "e"]
    assert pair.got_a == ["hi"]
    assert pair.failed() == ["c", "d"]
    assert [action.reason for action in pair.events if isinstance(action, Failed)] == ["the peer was restarted"]
    assert NewIncarnation(21) in pair.events


def test_frames_sent_after_a_known_end_are_for_the_next_incarnation():
    pair = Pair()
    pair.send(pair.a, "taken")
    pair.pump()
    pair.wait(0.02)
    pair.send(pair.a, "lost")
    pair.to_b.clear()
    pair.do(pair.a, pair.a.bury("h1 is lost", pair.now))
    assert pair.failed() == ["lost"]
    assert pair.send(pair.a, "next") is None
    pair.b = Link(21, config=pair.config)
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.got_b == ["taken", "next"]
    assert pair.failed() == ["lost"]
    assert not pair.a.blocked(pair.config.window - 2000)  # only kept frames count


def test_an_incarnation_given_up_too_early_goes_on_without_repetition():
    pair = Pair()
    pair.send(pair.a, "one")
    pair.pump()
    pair.send(pair.b, "answer")
    pair.pump()
    pair.wait(0.04)
    pair.do(pair.a, pair.a.bury("no connection", pair.now))
    pair.reconnect()
    pair.send(pair.a, "two")
    pair.send(pair.b, "another")
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.got_b == ["one", "two"]
    assert pair.got_a == ["answer", "another"]
    assert pair.failed() == []


def test_late_words_of_a_life_that_is_over_are_not_heard():
    pair = Pair()
    pair.a.since = 21
    pair.pump()
    assert pair.a.peer_incarnation == 0
    pair.reconnect()
    pair.b = Link(21, config=pair.config)
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.a.peer_incarnation == 21


def test_frames_for_a_former_incarnation_are_not_taken_by_the_next():
    pair = Pair()
    pair.pump()
    old = pair.a.send("x", 10)
    young = Link(21)
    outcome = young.received(old, "x", 10, 0.0)
    assert [type(action) for action in outcome] == [Transmit]
    assert PREFIX.unpack_from(outcome[0].prefix)[0] == PrefixKind.STATE


def test_a_former_life_of_the_peer_is_not_heard():
    pair = Pair()
    pair.pump()
    late = pair.b.send("late", 10)
    successor = Link(21)
    pair.a.disconnected(0.0)
    hello = pair.a.connected(0.0)[0].prefix
    for action in successor.received(hello, None, 0, 0.0):
        pair.a.received(action.prefix, None, 0, 0.0)
    assert pair.a.peer_incarnation == 21
    assert pair.a.received(late, "late", 10, 0.0) == -1


def test_a_new_link_object_at_the_dialler_starts_a_new_life():
    pair = Pair()
    pair.pump()
    pair.send(pair.b, "old")
    pair.to_a.clear()
    pair.a = Link(11, dials=True, config=pair.config)
    pair.do(pair.a, pair.a.connected(0.0))
    pair.send(pair.a, "x")
    pair.pump()
    pair.send(pair.b, "y")
    pair.pump()
    assert pair.failed() == ["old"]
    assert (pair.got_b, pair.got_a) == (["x"], ["y"])


def test_frames_to_an_unknown_incarnation_on_a_broken_link_fail():
    pair = Pair()
    pair.send(pair.a, "x")
    pair.reconnect()
    pair.send(pair.a, "y")
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    pair.wait(0.2)
    assert pair.failed() == ["x"]
    assert pair.got_b == ["y"]


def test_an_answer_that_is_read_after_the_break_ends_all_doubt():
    pair = Pair()
    pair.send(pair.a, "x")
    frames, pair.to_b[:] = pair.to_b[:], []
    for prefix, item, size in frames:
        outcome = pair.b.received(prefix, item, size, 0.0)
        pair.do(pair.b, outcome if isinstance(outcome, list) else [Deliver(item, outcome)])
    pair.a.disconnected(0.0)
    pair.b.disconnected(0.0)
    pair.pump()  # its earlier frames
    assert pair.failed() == []
    pair.do(pair.a, pair.a.connected(0.0))
    pair.pump()
    pair.wait(1.0)
    assert (pair.got_b, pair.failed()) == (["x"], [])


def test_frames_resent_in_vain_fail_in_time_and_others_go_on():
    pair = Pair()
    pair.pump()
    pair.loses.add("cursed")
    pair.send(pair.a, "cursed")
    while not pair.failed() and pair.now < 100:
        pair.wait(0.1)
    assert 30 <= pair.now <= 45
    assert pair.failed() == ["cursed"]
    pair.send(pair.a, "fine")
    pair.pump()
    assert pair.got_b == ["fine"]
    assert Skipped(0, 1) in pair.events


def test_a_frame_is_resent_several_times_however_few_answers_come():
    """Where many frames are lost, few questions are answered: each answer has the frame sent again."""
    pair = Pair(LinkConfig(gap_timeout=5.0))
    pair.loses = {"x"}
    pair.send(pair.a, "x")
    pair.pump()
    for _ in range(4):
        pair.now += 6.0
        pair.do(pair.a, pair.a.tick(pair.now))
        pair.pump()
    assert pair.events == []
    pair.loses.clear()
    pair.wait(2.0)
    assert pair.got_b == ["x"]


def test_a_connection_that_stays_away_fails_what_is_kept():
    pair = Pair()
    pair.pump()
    pair.reconnect()
    pair.send(pair.a, "x")
    pair.wait(59)
    assert pair.failed() == []
    pair.wait(2)
    assert pair.failed() == ["x"]
    pair.send(pair.a, "y")
    pair.do(pair.a, pair.a.connected(pair.now))
    pair.pump()
    assert pair.got_b == ["y"]


def test_giving_up_fails_what_is_kept_and_later_messages_go_on():
    pair = Pair()
    pair.pump()
    pair.send(pair.a, "x")
    pair.to_b.clear()
    pair.do(pair.a, pair.a.give_up("because"))
    pair.send(pair.a, "y")
    pair.pump()
    assert pair.failed() == ["x"]
    assert pair.got_b == ["y"]


SMALL = LinkConfig(window=10 << 10)


def test_credits_block_until_the_application_took_something():
    link, peer = Link(1, dials=True, config=SMALL), Link(2, config=SMALL)
    prefixes = []
    while not link.blocked(1000):
        prefixes.append(link.send("x", 1000))
    assert len(prefixes) == 10
    for prefix in prefixes:
        outcome = peer.received(prefix, "x", 1000, 0.0)
    assert link.blocked(1000)
    reply = peer.consumed(1, peer.peer_incarnation)
    assert reply is not None
    outcome = link.received(reply, None, 0, 0.0)
    assert Unblocked() in outcome
    assert not link.blocked(1000)


def test_small_messages_cost_a_kilobyte_each():
    link = Link(1, dials=True, config=SMALL)
    count = 0
    while not link.blocked(0):
        link.send("x", 0)
        count += 1
    assert count == 10


def test_one_oversize_message_alone_is_let_through():
    link = Link(1, dials=True, config=SMALL)
    assert not link.blocked(1 << 30)
    link.send("huge", 1 << 30)
    assert link.blocked(1)


def test_exempt_messages_and_the_urgent_lane_cost_nothing():
    link = Link(1, dials=True, config=SMALL)
    link.send("reply", 1 << 30, True)
    assert not link.blocked(1 << 30)
    urgent = Link(1, lane=1, dials=True, config=SMALL)
    urgent.send("stop", 1 << 30)
    assert not urgent.blocked(1 << 30)


def test_credits_come_back_when_the_frame_with_them_was_lost():
    pair = Pair(SMALL)
    pair.pump()
    while not pair.a.blocked(1000):
        pair.send(pair.a, "x", 1000)
    pair.pump()
    assert not pair.a.blocked(1000)
    while not pair.a.blocked(1000):
        pair.send(pair.a, "x", 1000)
    frames, pair.to_b[:] = pair.to_b[:], []
    for prefix, item, size in frames:
        outcome = pair.b.received(prefix, item, size, 0.0)
        if isinstance(outcome, int):
            pair.b.consumed(outcome, pair.b.peer_incarnation)
    pair.b.tick(0.02)  # this acknowledgement is lost
    pair.wait(2.5)
    assert Unblocked() in pair.events


def test_a_restart_gives_the_credits_of_the_old_life_back():
    pair = Pair(SMALL)
    pair.pump()
    while not pair.a.blocked(1000):
        pair.send(pair.a, "x", 1000)
    pair.reconnect()
    pair.b = Link(21, config=SMALL)
    pair.do(pair.a, pair.a.connected(0.0))
    pair.pump()
    assert Unblocked() in pair.events
    assert not pair.a.blocked(1000)


def test_credits_for_a_former_life_are_not_given_to_the_next():
    pair = Pair(SMALL)
    pair.pump()
    assert pair.b.consumed(5, 9) is None
    assert pair.b.idle


def test_a_short_frame_is_refused():
    with pytest.raises(Exception, match="unpack_from requires"):
        Link(1).received(b"short", None, 0, 0.0)
