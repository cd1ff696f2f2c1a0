"""Which process of a host fetches a value that was put elsewhere: a list without I/O, and random histories of it."""

import random

import pytest

from monarch_nb.rdma.puts import Copies, Location, starts
from monarch_nb.rdma.verbs import ProcessIdentity

pytestmark = pytest.mark.timeout(60)
HERE, THERE = ProcessIdentity("a", 1, 10), ProcessIdentity("b", 1, 20)


def test_the_first_of_a_host_fetches_and_the_others_wait() -> None:
    copies = Copies[str]()
    assert copies.ask(HERE, "first", missing=False) is True
    assert copies.ask(THERE, "elsewhere", missing=False) is True
    assert copies.ask(HERE, "second", missing=False) is None
    assert copies.waiting() == ["second"]
    location = Location("p1", 10, 5)
    assert copies.held(HERE, location) == ["second"]
    assert copies.ask(HERE, "third", missing=False) == location
    assert (copies.waiting(), copies.holders()) == ([], ["p1"])


def test_a_missing_copy_is_fetched_once_and_every_waiter_gets_it() -> None:
    copies = Copies[str]()
    copies.ask(HERE, "dies", missing=False)
    copies.ask(HERE, "waits", missing=False)
    assert copies.ask(HERE, "impatient", missing=True) is True
    assert copies.held(HERE, Location("p2", 11, 6)) == ["waits"]


def test_all_fetchers_are_known_even_where_one_was_slow() -> None:
    copies = Copies[str]()
    copies.ask(HERE, "slow", missing=False)
    assert copies.ask(HERE, "impatient", missing=True) is True
    copies.held(HERE, Location("impatient", 11, 6))
    copies.held(HERE, Location("slow", 10, 5))
    copies.held(THERE, Location("far", 20, 5))
    assert copies.holders() == ["impatient", "slow", "far"], "a dropped value is let go by all of them"


def test_nobody_waits_for_ever_however_fetchers_die() -> None:
    chance = random.Random(3)
    for _ in range(300):
        copies = Copies[int]()
        receivers: set[int] = set()
        fetching: list[int] = []
        askers = list(range(chance.randrange(1, 8)))
        for asker in askers:
            answer = copies.ask(HERE, asker, missing=False)
            if answer is True:
                fetching.append(asker)
            elif answer is not None:
                receivers.add(asker)
            if fetching and chance.random() < 0.3:
                if chance.random() < 0.5:
                    fetching.pop()  # it dies
                else:
                    fetcher = fetching.pop()
                    receivers |= {fetcher, *copies.held(HERE, Location("p", fetcher, 1))}
        for asker in copies.waiting():  # each asks again after a while
            if copies.ask(HERE, asker, missing=True) is True:
                receivers |= {asker, *copies.held(HERE, Location("p", asker, 1))}
        assert copies.waiting() == []


def test_frames_in_a_file_do_not_overlap_and_are_aligned() -> None:
    sizes = [1, 0, 64, 65, 1000]
    begin = starts(sizes)
    assert all(start % 64 == 0 for start in begin)
    assert begin[0] == 64
    assert all(a + size <= b for a, size, b in zip(begin, sizes, begin[1:], strict=False))
