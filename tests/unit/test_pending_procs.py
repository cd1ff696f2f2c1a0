"""Processes that are written to before they are there: who is waited for, and who never comes."""

from random import Random

from monarch_nb.host.service import PendingProcs
from monarch_nb.wire import proc_address


def at(incarnation: int, rank: int = 0) -> str:
    return proc_address("h", "p1", rank, incarnation)


def test_an_earlier_incarnation_is_not_awaited_once_a_later_one_started() -> None:
    pending = PendingProcs()
    assert pending.expect(at(1))
    assert pending.expect(at(3))
    assert pending.expect(at(1, rank=1))
    assert pending.started(at(2)) == [at(1)]
    assert not pending.expect(at(1))
    assert pending.expect(at(3))
    assert pending.expect(at(1, rank=1))


def test_a_started_process_is_no_longer_pending() -> None:
    pending = PendingProcs()
    assert pending.expect(at(0))
    assert pending.started(at(0)) == []
    assert pending.expect(at(1))
    pending.expire(at(1))
    assert pending.started(at(2)) == []


def test_every_sender_learns_once_that_a_process_never_comes() -> None:
    for seed in range(300):
        dice, pending = Random(seed), PendingProcs()
        latest, waiting = -1, set[int]()
        for _ in range(30):
            incarnation = dice.randrange(latest + 4)
            if dice.random() < 0.6:
                may_come = pending.expect(at(incarnation))
                assert may_come == (incarnation >= latest)
                if may_come:
                    waiting.add(incarnation)
            elif incarnation > latest:
                latest = incarnation
                told = pending.started(at(incarnation))
                assert told == sorted(at(each) for each in waiting if each < incarnation)
                waiting = {each for each in waiting if each > incarnation}
