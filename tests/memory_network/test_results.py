"""Results of calls that end while no controller is there: kept by the processes, or lost with a reason."""

from typing import Any

import numpy as np
import pytest

import monarch_nb as monarch
from monarch_nb.actor import Actor, ActorError, ProcMesh, current_rank, endpoint
from monarch_nb.config import configured
from monarch_nb.connect import ResultLostError
from monarch_nb.runtime import current_runtime

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Worker(Actor):
    """Tells its process that a controller has left, as host agents do."""

    @endpoint
    def hear(self, controller: str, away: bool) -> None:
        controllers = current_runtime().local.away  # type: ignore[attr-defined]
        (controllers.add if away else controllers.discard)(controller)

    @endpoint
    def double(self, value: Any) -> Any:
        return 2 * value

    @endpoint
    def many(self, count: int) -> list[Any]:
        return [np.full(8192, number, dtype=np.uint8) for number in range(count)]

    @endpoint
    def fail_on(self, rank: int) -> int:
        own_rank = int(current_rank().rank)
        if own_rank == rank:
            raise ValueError(f"not on {rank}")
        return own_rank


@pytest.fixture
def workers(own_procs: ProcMesh) -> Any:
    """Two workers, for which the test can be a controller that has left."""
    return own_procs.spawn("workers", Worker)


def leave(workers: Any, away: bool = True) -> None:
    """Says so with a broadcast, which has no answer."""
    workers.hear.broadcast(current_runtime().address, away)


def results_of(workers: Any) -> Any:
    """The results, once all calls have been answered."""
    leave(workers, away=False)
    workers.hear.call("", False).get(20)
    return monarch.results(workers)


def test_a_call_gives_what_its_future_would_have_given(workers: Any) -> None:
    leave(workers)
    calls = [workers.double.call(21), workers.slice(gpus=1).double.call_one(np.ones(100_000))]
    part, full = sorted(results_of(workers), key=lambda result: len(result.ranks))  # they end in any order
    assert not any(call.done() for call in calls)
    assert (full.endpoint, full.ranks, full.ok) == ("double", (0, 1), True)
    assert full.get() == workers.double.call(21).get()
    assert part.ranks == (1,)
    assert part.get().sum() == 200_000
    assert "workers.double() on gpus=1: 781 kB" in repr(part)
    results = monarch.results("workers")
    assert len(results) == 2
    results.forget()
    assert repr(monarch.results(workers)) == "no call of workers has ended while nobody was there"


def test_an_answer_of_many_small_arrays_is_stored(workers: Any) -> None:
    leave(workers)
    call = workers.many.call(6)
    [result] = results_of(workers)
    assert not call.done()
    assert [[int(array[0]) for array in arrays] for arrays in result.get().values()] == 2 * [[0, 1, 2, 3, 4, 5]]


def test_partial_results_raise_with_the_rank_and_keep_the_others(workers: Any) -> None:
    leave(workers)
    call = workers.fail_on.call(1)
    [result] = results_of(workers)
    assert not call.done()
    with pytest.raises(ActorError, match=r"workers.fail_on failed on 1 of 2 ranks: gpus=1") as caught:
        result.get()
    assert isinstance(caught.value.exception, ValueError)
    values = result.values()
    assert values[0] == 0
    assert str(values[1]) == "not on 1"
    assert "raised ValueError: not on 1 on gpus=1" in repr(result)


def test_an_incomplete_result_keeps_the_answers_that_had_come(workers: Any) -> None:
    leave(workers.slice(gpus=1))
    workers.double.call("ab")
    [result] = results_of(workers)
    with pytest.raises(ResultLostError, match=r"double\(\) is not complete: 1 of 2 ranks \(gpus=1\) ended while "):
        result.get()
    assert result.values() == {1: "abab"}


@pytest.mark.usefixtures("simulated")  # processes have their settings from when they were spawned
def test_results_too_large_to_store_are_reported(workers: Any) -> None:
    with configured(kept_results_size=1000):
        leave(workers)
        workers.double.call(bytes(600))
        [result] = results_of(workers)
        assert not result.ok
        with pytest.raises(ResultLostError, match=r"what gpus=0-1 answered \(2\.\d+ kB\) was more than kept_results"):
            result.get()
        assert result.values() == {}


def test_a_mesh_that_nobody_has_is_told() -> None:
    with pytest.raises(LookupError, match=r"there is no mesh 'others' here: attach it first, monarch.attach\('others'"):
        monarch.results("others")
