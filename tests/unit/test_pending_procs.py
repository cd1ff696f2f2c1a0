"""Messages to processes that have not started: which are awaited, and which never come."""

from random import Random

from monarch_nb.host.service import PendingProcs
from monarch_nb.wire import proc_address


def address(incarnation: int, rank: int = 0) -> str:
    return proc_address("h", "p1", rank, incarnation)


def test_an_earlier_incarnation_is_not_awaited_once_a_later_one_started() -> None:
    pending = PendingProcs()
    assert pending.expect(address(1))
    assert pending.expect(address(3))
    assert pending.expect(address(1, rank=1))
    assert pending.started(address(2)) == [address(1)]
    assert not pending.expect(address(1))
    assert pending.expect(address(3))
    assert pending.expect(address(1, rank=1))


def test_a_started_process_is_no_longer_pending() -> None:
    pending = PendingProcs()
    assert pending.expect(address(0))
    assert pending.started(address(0)) == []
    assert pending.expect(address(1))
    pending.expire(address(1))
    assert pending.started(address(2)) == []


def test_every_sender_learns_once_that_a_process_never_comes() -> None:
    for seed in range(300):
        dice, pending = Random(seed), PendingProcs()
        latest, waiting = -1, set[int]()
        for _ in range(30):
            incarnation = dice.randrange(latest + 4)
            if dice.random() < 0.6:
                may_come = pending.expect(address(incarnation))
                assert may_come == (incarnation >= latest)
                if may_come:
                    waiting.add(incarnation)
            elif incarnation > latest:
                latest = incarnation
                addresses = pending.started(address(incarnation))
                assert addresses == sorted(address(number) for number in waiting if number < incarnation)
                waiting = {number for number in waiting if number > incarnation}
