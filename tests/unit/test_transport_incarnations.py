"""Agents that are killed and started anew while they dial each other: once told of each other, they can talk."""

import pytest

from monarch_nb.routing import Incarnations, LinkIncarnations, process_incarnation
from monarch_nb.transport import peer, tcp
from tests.effort import tries
from tests.unit.agents_world import Back, World

pytestmark = pytest.mark.timeout(120)
SOON = 2.0  # seconds of the world's clock: a question after something was lost costs one


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    result = World(request.param)
    monkeypatch.setattr(peer, "_clock", result.clock)
    monkeypatch.setattr(tcp, "InboundChannel", Back)
    return result


def _history(world: World, steps: int) -> None:
    """Deaths, cuts, words and messages, in any order; the controller tells of each death once, or not at all."""
    dice = world.dice
    for host in world.agents:
        world.tell_back(host)
    for number in range(steps):
        host = dice.choice(("h1", "h2"))
        match dice.randrange(24):
            case 0:
                incarnation = world.agents[host].incarnation
                world.restart(host)
                if dice.random() < 0.7:
                    world.tell_lost(host, incarnation)
                if dice.random() < 0.7:
                    world.tell_back(host)
                if dice.random() < 0.5:
                    world.tell_back(world.other(host))
            case 1:  # a cut longer than the lease: it was taken for lost, and is not
                world.tell_lost(host, world.agents[host].incarnation)
                if dice.random() < 0.7:
                    world.tell_back(host)
            case 2:
                if world.wires:
                    world.breaks(dice.choice(world.wires))
            case 3:
                world.tick()
            case 4 | 5 | 6:
                world.agents[host].send(world.other(host), f"early {number}", dice.randrange(2))
            case _:
                world.step()


@pytest.mark.parametrize("world", range(tries(300)), indirect=True)
def test_once_both_are_told_who_lives_all_that_is_sent_arrives(world: World) -> None:
    _history(world, 150)
    hosts = world.dice.sample(("h1", "h2"), 2)
    for host in hosts:
        world.tell_back(host)
    for agent in world.agents.values():  # both have answered
        while agent.words:
            agent.words.popleft()()
    for agent in world.dead:  # as another controller may, later
        world.tell_lost(agent.host, agent.incarnation)
    expected: dict[str, list[str]] = {"h1": [], "h2": []}
    for number in range(12):
        host = world.dice.choice(hosts)
        text = f"late {number}"
        assert world.agents[host].send(world.other(host), text, lane=0)
        expected[world.other(host)].append(text)
        for _ in range(world.dice.randrange(6)):
            world.step()
    world.pass_time(SOON)
    for host, agent in world.agents.items():
        assert [failure for failure in agent.failed if failure[0].startswith("late")] == []
        assert [text for text in agent.got if text.startswith("late")] == expected[host]
        assert len(agent.got) == len(set(agent.got))


def test_ending_an_earlier_incarnation_does_not_affect_a_later_one() -> None:
    incarnations = Incarnations()
    incarnations.back("h1/agent", 7)
    assert not incarnations.lost("h1/agent", 5, "late news")
    assert incarnations.ended == {}
    assert incarnations.lost("h1/agent", 7, "it has ended")
    assert incarnations.ended == {"h1/agent": "it has ended"}
    assert not incarnations.speaks("h1/agent", 7)
    assert incarnations.speaks("h1/agent", 8)
    assert incarnations.ended == {}
    assert not incarnations.lost("h1/agent", 7, "reported twice", last_seen=8)


def test_an_incarnation_wrongly_taken_for_ended_is_received_again() -> None:
    incarnations = Incarnations()
    assert incarnations.lost("h1/agent", 7, "no connection for 60 s")
    incarnations.back("h1/agent", 7)
    assert incarnations.speaks("h1/agent", 7)
    assert not incarnations.speaks("h1/agent", 6)


def test_only_so_many_ends_are_remembered() -> None:
    incarnations = Incarnations(remembered=10)
    for number in range(30):
        incarnations.lost(f"h1/p{number}", 1, "it has ended")
    assert len(incarnations.ended) == 10
    assert "h1/p29" in incarnations.ended


def test_links_of_one_life_are_numbered_upwards_and_name_it() -> None:
    first, second = LinkIncarnations(1000), LinkIncarnations(1001)
    numbers = [first.next(), first.next(), second.next()]
    assert numbers == sorted(set(numbers))
    assert [process_incarnation(number) for number in numbers] == [1000, 1000, 1001]
