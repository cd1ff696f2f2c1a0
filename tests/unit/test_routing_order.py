"""Numbers per receiver, and messages put back in order whichever way they came."""

import random

import pytest

from monarch_nb.routing import Inbox, InboxOverflow, Outbox, expand, plan_cast
from monarch_nb.testing import VirtualClock
from monarch_nb.wire.header import Layout, Run
from tests.effort import tries

pytestmark = pytest.mark.timeout(60)


def spread(runs):
    """Every receiver by itself: (rank, proc incarnation, incarnation, number, place)."""
    return sorted(
        (
            run.rank + offset * run.stride,
            run.proc_incarnation,
            run.incarnation,
            run.seq,
            run.index + offset * run.index_stride,
        )
        for run in runs
        for offset in range(run.count)
    )


class PlainOutbox:
    def __init__(self):
        self.incarnations = {}

    def number(self, runs):
        numbered = []
        for run in runs:
            for offset in range(run.count):
                rank, incarnation = run.rank + offset * run.stride, (run.proc_incarnation, run.incarnation)
                latest, following = self.incarnations.get(rank, ((0, 0), 0))
                if incarnation > latest:
                    latest, following = incarnation, 0
                seq = -1 if incarnation < latest else following
                if seq >= 0:
                    self.incarnations[rank] = (latest, following + 1)
                numbered.append((rank, *incarnation, seq, run.index + offset * run.index_stride))
        return sorted(numbered)


def test_casts_to_a_whole_mesh_stay_one_run():
    outbox = Outbox()
    for number in range(5):
        assert outbox.number("m", [Run(0, 1_000_000)]) == [Run(0, 1_000_000, seq=number)]
    assert outbox.stretches("m") == 1


def test_a_single_send_splits_the_next_cast_until_stretches_merge():
    outbox = Outbox()
    outbox.number("m", [Run(0, 100)])
    outbox.number("m", [Run(40, 1)])
    assert outbox.number("m", [Run(0, 100)]) == [
        Run(0, 40, seq=1),
        Run(40, 1, seq=2, index=40),
        Run(41, 59, seq=1, index=41),
    ]
    outbox.number("m", [Run(0, 40), Run(41, 59)])
    assert outbox.stretches("m") == 1
    assert outbox.number("m", [Run(0, 100)]) == [Run(0, 100, seq=3)]


def test_meshes_do_not_share_numbers():
    outbox = Outbox()
    outbox.number("m", [Run(0, 4)])
    assert outbox.number("n", [Run(0, 4)]) == [Run(0, 4, seq=0)]
    outbox.forget("m")
    assert outbox.number("m", [Run(0, 4)]) == [Run(0, 4, seq=0)]


def test_healed_ranks_restart_at_zero_and_old_incarnations_are_over():
    outbox = Outbox()
    outbox.number("m", [Run(0, 8)])
    healed = [Run(0, 3), Run(3, 1, incarnation=1, index=3), Run(4, 4, index=4)]
    assert [run.seq for run in outbox.number("m", healed)] == [1, 0, 1]
    assert outbox.number("m", [Run(3, 1)])[0].seq == -1
    assert [run.seq for run in outbox.number("m", healed)] == [2, 1, 2]


def test_a_slice_across_all_hosts_does_not_split_into_ranks():
    outbox = Outbox()
    outbox.number("m", [Run(0, 80_000)])
    assert outbox.number("m", [Run(3, 10_000, stride=8)]) == [Run(3, 10_000, stride=8, seq=1)]
    assert len(outbox.number("m", [Run(0, 80_000)])) == 10
    assert outbox.stretches("m") == 10


def test_places_follow_when_a_run_is_split():
    outbox = Outbox()
    outbox.number("m", [Run(10, 1)])
    numbered = outbox.number("m", [Run(8, 4, index=100, index_stride=5)])
    assert spread(numbered) == [(8, 0, 0, 0, 100), (9, 0, 0, 0, 105), (10, 0, 0, 1, 110), (11, 0, 0, 0, 115)]


def test_empty_runs_give_nothing_and_bad_strides_are_refused():
    assert Outbox().number("m", [Run(0, 0)]) == []
    with pytest.raises(ValueError, match="stride"):
        Outbox().number("m", [Run(0, 5, stride=0)])


@pytest.mark.parametrize("seed", range(tries(150)))
def test_any_history_gives_the_numbers_of_the_plain_way(seed):
    dice = random.Random(seed)
    outbox, plain, size = Outbox(), PlainOutbox(), dice.choice([1, 7, 40, 96])
    wild = dice.random() < 0.5
    for _ in range(60):
        stride = dice.choice([1, 1, 1, 2, 3, 8] if not wild else [1, 2, 3, 5, 7, 8, 11, 70])
        rank = dice.randrange(size)
        count = dice.randint(1, (size - 1 - rank) // stride + 1) if dice.random() < 0.7 else 1
        incarnation = dice.choice([(0, 0)] * 6 + [(0, 1), (1, 0), (1, 1)])
        run = Run(rank, count, stride, *incarnation, index=dice.randrange(5), index_stride=dice.choice([1, 1, 2]))
        assert spread(outbox.number("m", [run])) == plain.number([run])


def test_order_is_kept_whichever_way_messages_come():
    inbox = Inbox()
    assert inbox.arrive("s", 1, "b", 0.0) == []
    assert inbox.arrive("s", 2, "c", 0.0) == []
    assert inbox.arrive("t", 0, "x", 0.0) == ["x"]
    assert inbox.arrive("s", 0, "a", 0.0) == ["a", "b", "c"]
    assert inbox.waiting == 0


def test_copies_and_old_numbers_are_dropped():
    inbox = Inbox()
    inbox.arrive("s", 0, "a", 0.0)
    assert inbox.arrive("s", 0, "a", 0.0) == []
    assert inbox.arrive("s", 2, "c", 0.0) == []
    assert inbox.arrive("s", 2, "c", 0.0) == []
    assert inbox.stats.duplicates == 2
    assert inbox.arrive("s", 1, "b", 0.0) == ["b", "c"]


def test_unordered_messages_pass_at_once():
    inbox = Inbox()
    inbox.arrive("s", 5, "later", 0.0)
    assert inbox.arrive("s", -1, "now", 0.0) == ["now"]


def test_a_gap_is_reported_after_its_time_and_can_be_skipped():
    inbox = Inbox()
    inbox.arrive("s", 0, "a", 0.0)
    inbox.arrive("s", 3, "d", 1.0)
    inbox.arrive("s", 4, "e", 20.0)
    assert inbox.expired(30.0) == []
    (gap,) = inbox.expired(31.0)
    assert (gap.sender, gap.first, gap.seconds, gap.waiting) == ("s", 1, 30.0, 2)
    assert inbox.skip("s", 31.0) == ["d", "e"]
    assert inbox.stats.skipped == 2
    assert inbox.expired(1000.0) == []
    assert inbox.arrive("s", 1, "b", 1000.0) == []
    assert inbox.arrive("s", 5, "f", 1000.0) == ["f"]


def test_progress_starts_the_clock_of_the_next_gap_anew():
    inbox = Inbox()
    inbox.arrive("s", 1, "b", 0.0)
    inbox.arrive("s", 3, "d", 0.0)
    assert inbox.arrive("s", 0, "a", 29.0) == ["a", "b"]
    assert inbox.expired(31.0) == []
    assert inbox.expired(59.0)[0].first == 2


def test_a_number_known_to_be_void_holds_nobody_back():
    inbox = Inbox()
    inbox.arrive("s", 1, "b", 0.0)
    assert inbox.void("s", 0, 0.0) == ["b"]
    assert inbox.void("s", 3, 0.0) == []
    assert inbox.arrive("s", 3, "d", 0.0) == []
    assert inbox.arrive("s", 2, "c", 0.0) == ["c"]
    assert inbox.arrive("s", 4, "e", 0.0) == ["e"]


def test_overflow_names_sender_and_number():
    inbox = Inbox(limit=3)
    for seq in (1, 2, 3):
        inbox.arrive("s", seq, seq, 0.0)
    with pytest.raises(InboxOverflow, match="3 messages from s wait for number 0"):
        inbox.arrive("s", 4, 4, 0.0)
    assert inbox.arrive("s", 0, 0, 0.0) == [0, 1, 2, 3]
    assert inbox.arrive("s", 4, 4, 0.0) == [4]


def test_forgetting_a_sender_gives_back_what_still_waited():
    inbox = Inbox()
    inbox.arrive("s", 2, "c", 0.0)
    inbox.arrive("s", 1, "b", 0.0)
    assert inbox.forget("s") == ["b", "c"]
    assert inbox.waiting == 0
    assert inbox.forget("s") == []
    assert inbox.expired(100.0) == []


@pytest.mark.parametrize("seed", range(tries(100)))
def test_direct_sends_and_tree_casts_arrive_in_the_order_sent(seed):
    """One sender, two paths of different speed, copies on both; ranks die and come back."""
    dice, clock = random.Random(seed), VirtualClock()
    hosts, per_host = dice.choice([(1, 1), (3, 4), (12, 3)])
    layout = Layout("p", tuple(f"h{number}" for number in range(hosts)), per_host)
    outbox, incarnations = Outbox(), [0] * layout.size
    inboxes = {}
    handled, expected = {}, {}

    def arrive(rank, incarnation, seq, item):
        key = rank, incarnation
        for ready in inboxes.setdefault(key, Inbox()).arrive("me", seq, item, clock.now):
            handled.setdefault(key, []).append(ready)

    def schedule(slowness, *message):
        for _ in range(1 + (dice.random() < 0.1)):
            clock.later(dice.random() * slowness, lambda: arrive(*message))

    def travel(branches, item):
        for _, plan in branches:
            deliveries, children = expand(plan, plan.head)
            for delivery in deliveries:
                schedule(0.5, delivery.rank, delivery.incarnation, delivery.seq, item)
            clock.later(dice.random(), lambda children=children: travel(children, item))

    for item in range(60):
        if dice.random() < 0.1:
            incarnations[dice.randrange(layout.size)] += 1
        if dice.random() < 0.5:
            runs = [Run(rank, 1, incarnation=incarnation, index=rank) for rank, incarnation in enumerate(incarnations)]
            travel(plan_cast(layout, outbox.number("m", runs), fanout=2), item)
            sent_to = range(layout.size)
        else:
            rank = dice.randrange(layout.size)
            (run,) = outbox.number("m", [Run(rank, 1, incarnation=incarnations[rank])])
            schedule(0.1, rank, incarnations[rank], run.seq, item)
            sent_to = [rank]
        for rank in sent_to:
            expected.setdefault((rank, incarnations[rank]), []).append(item)
        clock.advance(dice.choice([0.0, 0.1]))
    assert clock.settle()
    assert handled == expected
