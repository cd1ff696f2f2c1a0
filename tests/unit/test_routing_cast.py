"""The tree of a cast, and its replies on the way back."""

import random

import pytest

from monarch_nb.routing import Batch, Fold, LostIndices, expand, indices, plan_cast, size_of
from monarch_nb.wire.header import Layout, Run
from tests.effort import tries

pytestmark = pytest.mark.timeout(60)


def layout(hosts, per_host):
    return Layout("p", tuple(f"h{number}" for number in range(hosts)), per_host)


def single(index):
    return range(index, index + 1)


def walk(branches, depth=1):
    """All deliveries below, and the greatest depth."""
    deliveries, deepest = [], 0
    for agent, plan in branches:
        host = agent.removesuffix("/agent")
        local, children = expand(plan, host)
        assert size_of(plan.runs) == len(local) + sum(size_of(child.plan.runs) for child in children)
        assert len(children) <= plan.fanout
        assert {delivery.address.split("/")[0] for delivery in local} == {host}
        below, reached = walk(children, depth + 1)
        deliveries += local + below
        deepest = max(deepest, depth, reached)
    return deliveries, deepest


def test_every_rank_is_reached_once_with_its_number_and_place():
    runs = [
        Run(0, 10, seq=4),
        Run(10, 1, proc_incarnation=2, incarnation=3, seq=0, index=10),
        Run(11, 13, seq=4, index=11),
    ]
    deliveries, _ = walk(plan_cast(layout(6, 4), runs, fanout=2))
    assert [delivery.rank for delivery in sorted(deliveries, key=lambda entry: entry.rank)] == list(range(24))
    healed = next(delivery for delivery in deliveries if delivery.rank == 10)
    assert (healed.address, healed.incarnation, healed.seq, healed.index) == ("h2/p.10.2", 3, 0, 10)


def test_hosts_without_a_rank_take_no_part():
    branches = plan_cast(layout(100, 8), [Run(3, 3, stride=240)])
    assert [agent for agent, _ in branches] == ["h0/agent", "h30/agent", "h60/agent"]
    assert all(plan.hosts == (plan.runs[0].rank // 8,) for _, plan in branches)


def test_ten_thousand_hosts_are_reached_in_few_hops_with_local_knowledge():
    branches = plan_cast(layout(10_000, 8), [Run(0, 80_000, seq=7)])
    assert len(branches) == 8
    assert max(len(plan.hosts) for _, plan in branches) == 1250
    deliveries, depth = walk(branches)
    assert len(deliveries) == 80_000
    assert depth <= 5
    assert {delivery.index for delivery in deliveries} == set(range(80_000))


def test_a_plan_for_another_host_is_refused():
    ((_, plan),) = plan_cast(layout(1, 2), [Run(0, 2)])
    with pytest.raises(ValueError, match="h0"):
        expand(plan, "h1")


def test_ranks_outside_the_mesh_are_refused():
    with pytest.raises(ValueError, match="not all in a mesh of 8"):
        plan_cast(layout(2, 4), [Run(4, 5)])


def test_no_ranks_no_branches():
    assert plan_cast(layout(2, 4), []) == []


@pytest.mark.parametrize("seed", range(tries(100)))
def test_any_runs_are_covered_exactly(seed):
    dice = random.Random(seed)
    mesh = layout(dice.randint(1, 30), dice.randint(1, 9))
    ranks = list(range(mesh.size))
    runs, index = [], 0
    while ranks and len(runs) < 6:
        stride = dice.choice([1, 1, 2, mesh.per_host, 13])
        start = dice.choice(ranks)
        count = dice.randint(1, (mesh.size - 1 - start) // stride + 1)
        covered = range(start, start + count * stride, stride)
        if set(covered) <= set(ranks):
            runs.append(Run(start, count, stride, seq=dice.randrange(9), index=index, index_stride=2))
            index += 2 * count
            ranks = [rank for rank in ranks if rank not in covered]
        elif dice.random() < 0.2:
            break
    deliveries, _ = walk(plan_cast(mesh, runs, fanout=dice.randint(1, 5)))
    expected = [
        (run.rank + number * run.stride, run.seq, run.index + 2 * number) for run in runs for number in range(run.count)
    ]
    assert sorted((delivery.rank, delivery.seq, delivery.index) for delivery in deliveries) == sorted(expected)
    assert sorted(delivery.index for delivery in deliveries) == sorted(indices(runs))


def test_replies_go_on_together_when_all_are_here():
    fold = Fold(3)
    assert fold.reply(0, "a", 0.0) is None
    assert fold.reply(2, "c", 0.01) is None
    assert fold.reply(1, "b", 0.02) == Batch([(single(0), "a"), (single(2), "c"), (single(1), "b")], [], True)
    assert fold.tick(10.0) is None


def test_a_slow_rank_does_not_hold_back_the_others():
    fold = Fold(3)
    fold.reply(0, "a", 1.0)
    fold.reply(1, "b", 1.02)
    assert fold.deadline == 1.05
    assert fold.tick(1.04) is None
    assert fold.tick(1.05) == Batch([(single(0), "a"), (single(1), "b")], [], False)
    assert fold.deadline is None
    assert fold.reply(2, "c", 99.0) == Batch([(single(2), "c")], [], True)


def test_lost_ranks_complete_a_cast_with_their_reason():
    fold = Fold(4)
    fold.reply(1, "b", 0.0)
    fold.lost([0, 1], "killed", 0.0)
    batch = fold.lost(range(2, 4), "host down", 0.0)
    assert batch == Batch([(single(1), "b")], [LostIndices([0], "killed"), LostIndices([2, 3], "host down")], True)


def test_late_and_double_replies_reach_nobody():
    fold = Fold(2)
    fold.lost([0], "killed", 0.0)
    assert fold.reply(0, "late", 0.0) is None
    assert fold.reply(1, "b", 0.0) == Batch([(single(1), "b")], [LostIndices([0], "killed")], True)
    assert fold.reply(1, "again", 0.0) is None
    assert fold.missing == 0


@pytest.mark.parametrize("seed", range(tries(60)))
def test_folding_along_a_tree_answers_for_every_place_once(seed):
    dice = random.Random(seed)
    mesh = layout(dice.randint(1, 20), dice.randint(1, 4))
    answers, losses, now = {}, {}, 0.0

    def gather(plan):
        """The batches that an agent sends upwards, with some branches and ranks lost."""
        nonlocal now
        local, children = expand(plan, plan.head)
        fold, result = Fold(size_of(plan.runs)), []
        steps = [("rank", target) for target in local] + [("branch", target) for target in children]
        dice.shuffle(steps)
        for sort, target in steps:
            now += dice.random() * 0.1
            if dice.random() < 0.1:
                batches = [fold.lost([target.index] if sort == "rank" else indices(target.plan.runs), "gone", now)]
            elif sort == "rank":
                batches = [fold.reply(target.index, f"r{target.index}", now) for _ in range(dice.randint(1, 2))]
            else:
                batches = [fold.folded(below, now) for below in gather(target.plan)]
            result += [batch for batch in (*batches, fold.tick(now)) if batch is not None]
        assert [batch.complete for batch in result] == [False] * (len(result) - 1) + [True]
        return result

    for _, plan in plan_cast(mesh, [Run(0, mesh.size)], fanout=2):
        for batch in gather(plan):
            for span, item in batch.replies:
                for index in span:
                    assert index not in answers
                    answers[index] = item
            for lost in batch.lost:
                for index in lost.indices:
                    assert index not in losses
                    losses[index] = lost.reason
    assert sorted([*answers, *losses]) == list(range(mesh.size))
    assert all(item == f"r{index}" for index, item in answers.items())
