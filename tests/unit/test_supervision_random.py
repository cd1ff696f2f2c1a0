"""Random orders of failures, stops, heals and owners' answers; the invariants hold in each."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.effort import daily, tries
from tests.unit.supervision_world import SIZE, World


def wander(random: Random, steps: int) -> World:
    world = World(random, random.choice(("script", "notebook")))
    for _ in range(steps):
        step(world, random)
        world.revive_owner()
        world.verify()
    for _ in range(2000):
        if not world.reports:
            break
        world.report_one()
        world.verify()
    assert not world.reports, "it never comes to rest"
    world.verify_end()
    return world


def step(world: World, random: Random) -> None:
    world.now += random.choice((0, 1, 5, 30))
    uid = random.choice(list(world.incarnations))
    rank = random.randrange(SIZE)
    dice = random.randrange(100)
    if dice < 30:
        world.kill(uid, rank)
    elif dice < 33:
        world.lose_host()
    elif dice < 50:
        world.heal(uid, random.choice((None, None, frozenset({rank}), frozenset({0, rank}))))
    elif dice < 53:
        world.stop(uid)
    elif world.reports:
        world.report_one()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", daily(range(tries(8)), 2))
def test_every_order_of_events_keeps_the_promises(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        try:
            wander(Random(seed), 60)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.timeout(120)
@given(st.randoms(use_true_random=False), st.integers(0, 30))
@settings(max_examples=tries(75), suppress_health_check=list(HealthCheck))
def test_short_histories_keep_the_promises(random: Random, steps: int) -> None:
    wander(random, steps)


def test_the_wandering_meets_what_it_is_about() -> None:
    worlds = [wander(Random(seed), 60) for seed in range(60)]
    answers = {answer for world in worlds for answer in world.requests.values()}
    assert answers == {"healed", "refused"}
    assert any(world.faults for world in worlds)
    assert any(len(world.lost_owners) > 1 for world in worlds)
    assert any(incarnation > 2 for world in worlds for incarnation in world.incarnations["P"])
