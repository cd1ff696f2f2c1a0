"""A failed call runs again in the caller's process, on the actor and the arguments of the failed rank."""

import io
import pdb
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, ProcMesh, context, current_rank, endpoint, heal_mesh
from monarch_nb.config import configured
from monarch_nb.debug import DebugError
from monarch_nb.debug.reproduce import SKIPPED
from tests.cluster.actor_tools import SECONDS

pytestmark = [pytest.mark.timeout(120)]


class Helper(Actor):
    @endpoint
    def double(self, x: int) -> int:
        return 2 * x


class Trainer(Actor):
    __slots__ = ("__hidden", "slot")

    def __init__(self, helper: Any) -> None:
        self.values = [1, 2]
        self.alias = self.values
        self.me, self.helper = self, helper
        self.lock, self.ready = threading.RLock(), threading.Condition()
        self.slot, self.__hidden = "slot", 5
        self.table = {"in": {"a": (x for x in "abc"), "b": 3}}

    @endpoint
    def divide(self, x: int, *, plus: int = 0) -> Any:
        with self.lock, self.ready:
            assert self.me is self
            assert self.alias is self.values
            assert (self.slot, self.__hidden, self.table["in"]["b"]) == ("slot", 5, 3)
            assert self.helper.double.call_one(x).get(SECONDS) == 2 * x
        self.values.append(x)
        return (x + plus) / (current_rank().rank - 1)

    @endpoint
    def count(self) -> int:
        return len(self.values)

    @endpoint
    def reads(self) -> None:
        assert context().actor_instance.name == "trainers"
        raise ValueError(next(self.table["in"]["a"]))

    @endpoint
    def once(self, values: list[int]) -> str:
        values.pop()
        if not values:
            raise ValueError("the last one")
        return "fine"

    @endpoint
    def large(self, data: Any) -> None:
        raise ValueError("large")

    @endpoint
    def generates(self, x: int) -> Iterator[int]:
        yield x

    @endpoint
    def chained(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("while looking") from error


class Fetcher(Actor):
    @endpoint
    async def fetch(self, name: str) -> None:
        raise LookupError(name, current_rank().rank)


class Counter(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def first(self) -> int:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("the first call fails")
        return self.calls - 1


@pytest.fixture
def trainers(own_procs: ProcMesh) -> Any:
    helper = own_procs.spawn("helper", Helper).slice(gpus=0)
    return own_procs.spawn("trainers", Trainer, helper)


def failed(call: Any) -> ActorError:
    with pytest.raises(ActorError) as caught:
        call.get(SECONDS)
    return caught.value


def test_method_runs_here_on_the_state_and_arguments_of_rank(trainers: Any) -> None:
    error = failed(trainers.divide.call(3, plus=1))
    with pytest.raises(ZeroDivisionError) as caught:
        error.reproduce()
    assert caught.value.__cause__ is error
    assert error.reproduced is caught.value
    assert "This is divide() of gpus=1 of trainers, run again here." in caught.value.__notes__
    assert trainers.count.call().get(SECONDS).values() == [3, 3], "the actors themselves are as they were"


def test_cause_of_a_local_error_is_kept_before_the_remote_one(trainers: Any) -> None:
    error = failed(trainers.slice(gpus=0).chained.call_one())
    with pytest.raises(RuntimeError, match="while looking") as caught:
        error.reproduce()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__cause__ is error


def test_rank_is_one_of_those_that_raised(trainers: Any) -> None:
    error = failed(trainers.large.call(1))
    with pytest.raises(ValueError, match="large") as caught:
        error.reproduce(rank=1)
    assert "large() of gpus=1 of trainers" in caught.value.__notes__[0]
    with pytest.raises(DebugError, match="rank 2 has not raised in this call; these have: 0-1"):
        error.reproduce(rank=2)


def test_async_method_runs_on_a_loop_of_its_own(own_procs: ProcMesh) -> None:
    error = failed(own_procs.spawn("fetchers", Fetcher).slice(gpus=1).fetch.call_one("x"))
    with pytest.raises(LookupError) as caught:
        error.reproduce()
    assert caught.value.args == ("x", 0), "the rank is that in the slice that was called"


def test_another_error_than_on_the_rank_says_so(trainers: Any) -> None:
    error = failed(trainers.slice(gpus=0).once.call_one([1]))
    with pytest.raises(IndexError) as caught:  # the list is empty: it is as the failed call has left it
        error.reproduce()
    assert "On the rank it was ValueError: the last one. What differs here: " in caught.value.__notes__[1]


def test_what_cannot_be_brought_raises_where_it_is_used(trainers: Any) -> None:
    error = failed(trainers.slice(gpus=0).reads.call_one())
    with pytest.raises(DebugError, match=r"not here: self\.table, a builtins.generator"):
        error.reproduce()


def test_warning_names_what_differs_from_the_rank(own_procs: ProcMesh) -> None:
    counters = own_procs.spawn("counters", Counter)
    error = failed(counters.slice(gpus=1).first.call_one())
    with pytest.warns(
        UserWarning, match=r"first\(\) of .* of counters did not fail again here. What differs: "
    ) as warnings:
        assert error.reproduce() == 1
    assert warnings[0].filename == __file__
    assert "the state and the arguments are as the failed call" in str(warnings[0].message)


def test_more_bytes_than_the_limit_are_refused(trainers: Any) -> None:
    error = failed(trainers.slice(gpus=0).large.call_one(bytes(100_000)))
    with pytest.raises(DebugError, match="more than 50,000 bytes"):
        error.reproduce(limit=50_000)
    with pytest.raises(ValueError, match="large"):
        error.reproduce(limit=200_000)


def test_stepping_begins_at_the_first_line_of_the_method(trainers: Any) -> None:
    error = failed(trainers.divide.call(3))
    shown = io.StringIO()
    step = lambda: pdb.Pdb(stdin=io.StringIO("p x\nq\n"), stdout=shown, skip=SKIPPED)  # noqa: E731
    assert error.reproduce(step=step) is None
    assert "with self.lock, self.ready:\n(Pdb) 3\n" in shown.getvalue()


def test_stepping_into_an_async_method_passes_its_loop_by(own_procs: ProcMesh) -> None:
    error = failed(own_procs.spawn("fetchers", Fetcher).slice(gpus=0).fetch.call_one("x"))
    shown = io.StringIO()
    step = lambda: pdb.Pdb(stdin=io.StringIO("p name\nc\n"), stdout=shown, skip=SKIPPED)  # noqa: E731
    with pytest.raises(LookupError):
        error.reproduce(step=step)
    assert "raise LookupError(name, current_rank().rank)\n(Pdb) 'x'\n" in shown.getvalue()


def test_dead_rank_has_nothing_any_more(trainers: Any, own_procs: ProcMesh, kill: Callable[[ProcMesh], None]) -> None:
    error = failed(trainers.divide.call(3))
    kill(own_procs.slice(gpus=1))
    with pytest.raises(DebugError, match="gpus=1 of trainers has failed since"):
        error.reproduce()
    heal_mesh(trainers)
    with pytest.raises(DebugError, match="the rank was healed since the failure"):
        error.reproduce()
    assert "ZeroDivisionError" in error.exception_formatted


def test_rank_keeps_the_last_failures_only(trainers: Any) -> None:
    trainer = trainers.slice(gpus=0)
    with configured(debug_keep_failures=1):
        errors = [failed(trainer.large.call_one(number)) for number in range(2)]
        trainer.count.call_one().get(SECONDS)  # earlier frames are released after the caller's answer
        with pytest.raises(DebugError, match="has nothing of it any more"):
            errors[0].reproduce()
        with pytest.raises(ValueError, match="large"):
            errors[1].reproduce()


def test_calls_that_cannot_be_run_here_say_why(trainers: Any) -> None:
    with pytest.raises(DebugError, match="only its result could not be sent"):
        failed(trainers.slice(gpus=0).generates.call_one(1)).reproduce()
    with pytest.raises(RuntimeError, match="of no call of this process"):
        ActorError(ValueError("made by hand")).reproduce()
    error = failed(trainers.slice(gpus=0).large.call_one(1))
    trainers.stop().get(SECONDS)
    with pytest.raises(DebugError, match="trainers was stopped"):
        error.reproduce()
