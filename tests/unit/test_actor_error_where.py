"""An ActorError says where, mesh, endpoint, ranks and host, and has each rank's exception for programs."""

import asyncio
import pickle
import threading
import time

import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, ActorError, current_rank, endpoint, run_on, shutdown_context
from monarch_nb.config import configured
from monarch_nb.testing import in_process_host

pytestmark = pytest.mark.timeout(30)


class Trainer(Actor):
    @endpoint
    def step(self, broken, same=True):
        rank = current_rank().rank
        if rank in broken:
            raise ValueError("bad batch" if same else f"bad batch {rank}")
        return rank

    @endpoint
    def mixed(self):
        raise (ValueError("odd") if current_rank().rank % 2 else KeyError("even"))

    @endpoint
    def hang(self, broken):
        if current_rank().rank in broken:
            raise ValueError("bad batch")
        GATE.wait(20)

    @endpoint
    def late(self, seconds):
        time.sleep(seconds[current_rank().rank])
        raise ValueError(f"rank {current_rank().rank}")

    @endpoint
    def collective(self, own):
        """Rank 2 raises by itself, a second after the ranks of its group."""
        rank = current_rank().rank
        error = RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9133")
        if rank == 2:
            time.sleep(0.7)
            try:
                raise ValueError("nan in batch 20")
            finally:
                if own:
                    raise error
        raise error


class Asker(Actor):
    @endpoint
    async def ask(self, trainers):
        await trainers.step.call([1, 2])


GATE = threading.Event()


@pytest.fixture(scope="module", autouse=True)
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
        yield
        GATE.set()
        shutdown_context()


@pytest.fixture(scope="module")
def procs(engine):
    return in_process_host().spawn_procs(per_host={"gpus": 4}, name="pretend")


@pytest.fixture(scope="module")
def trainers(procs):
    return procs.spawn("trainers", Trainer)


def failed(future):
    with pytest.raises(ActorError) as caught:
        future.get(20)
    return caught.value


def first_line(error):
    return str(error).splitlines()[0]


def test_the_first_line_names_mesh_endpoint_ranks_and_host(trainers, procs):
    error = failed(trainers.step.call([1, 3]))
    host = procs._state.layout.hosts[0]
    assert first_line(error) == (
        f"Actor call trainers.step failed on 2 of 4 ranks: gpus=1,3; the same error (host {host})"
    )
    assert error.message == "Actor call trainers.step failed."  # as it is upstream
    assert "Traceback of where the remote call failed (most recent call last):" in str(error)
    assert "1 of 4 ranks: gpus=3 (host" in first_line(failed(trainers.step.call([3])))
    assert "4 of 4 ranks: gpus=0-3; the same error" in first_line(failed(trainers.step.call([0, 1, 2, 3])))


def test_each_rank_has_its_exception(trainers):
    error = failed(trainers.step.call([1, 3], same=False))
    assert {rank: str(cause) for rank, cause in error.failures.items()} == {1: "bad batch 1", 3: "bad batch 3"}
    assert list(error.failures) == [1, 3]
    assert error.exception is error.failures[1]  # the first in rank order, with its traceback
    assert "raise ValueError" in error.exception_formatted


def test_errors_that_differ_are_told_by_group(trainers):
    lines = str(failed(trainers.mixed.call())).splitlines()
    assert "trainers.mixed failed on 4 of 4 ranks: gpus=0-3; 2 different errors" in lines[0]
    assert lines[1:3] == ["  gpus=0,2: KeyError: 'even'", "  gpus=1,3: ValueError: odd"]
    assert "KeyError: 'even'" in lines[-1]


def test_a_slice_is_named_in_its_meshs_coordinates_with_own_ranks(trainers):
    error = failed(trainers.slice(gpus=slice(2, 4)).step.call([1]))
    assert "failed on 1 of 2 ranks: gpus=3" in first_line(error)
    assert list(error.failures) == [1]  # as in the ValueMesh of a successful call


def test_one_rank_asked_is_named(trainers):
    assert "trainers.step failed on gpus=2 (host" in first_line(failed(trainers.slice(gpus=2).step.call_one([0])))
    assert "trainers.mixed failed on gpus=" in first_line(failed(trainers.mixed.choose()))


def test_each_future_of_a_stream_names_its_rank(trainers):
    lines = []
    for future in trainers.step.stream([1, 2]):
        error = future.exception(20)
        if error is not None:
            assert isinstance(error, ActorError)
            lines.append((first_line(error).partition(" (")[0], list(error.failures)))
    assert sorted(lines) == [
        ("Actor call trainers.step failed on gpus=1", [1]),
        ("Actor call trainers.step failed on gpus=2", [2]),
    ]


def test_await_tells_the_same(trainers):
    async def wait():
        await trainers.step.call([1, 3])

    with pytest.raises(ActorError, match=r"on 2 of 4 ranks: gpus=1,3; the same error"):
        asyncio.run(wait())


def test_a_cell_on_the_ranks_says_that_it_was_a_cell(trainers):
    source = "if rank in (0, 2):\n    raise ValueError('bad cell')"
    assert "The cell failed on 2 of 4 ranks of trainers: gpus=0,2; the same error" in first_line(
        failed(run_on(trainers, source))
    )


def test_a_cell_on_processes_does_too(procs):
    source = "if rank == 1:\n    raise ValueError('bad cell')"
    assert "The cell failed on 1 of 4 ranks of pretend: gpus=1" in first_line(failed(run_on(procs, source)))


def test_all_of_it_survives_pickling_and_the_way_through_another_actor(trainers, procs):
    error = failed(trainers.step.call([1, 3], same=False))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert {rank: repr(cause) for rank, cause in copy.failures.items()} == {
        rank: repr(cause) for rank, cause in error.failures.items()
    }
    assert copy.exception is copy.failures[1]
    asker = procs.slice(gpus=0).spawn("asker", Asker)
    outer = failed(asker.ask.call_one(trainers))
    inner = outer.exception
    assert isinstance(inner, ActorError)
    assert "trainers.step failed on 2 of 4 ranks: gpus=1-2; the same error" in str(inner)
    assert list(inner.failures) == [1, 2]


def test_a_hanging_rank_does_not_delay_anothers_error(trainers):
    with configured(call_error_window="200ms"):
        start = time.monotonic()
        error = failed(trainers.hang.call([2]))
    assert time.monotonic() - start < 10
    assert "1 of 4 ranks: gpus=2; gpus=0-1,3 had not answered" in first_line(error)
    assert list(error.failures) == [2]
    GATE.set()


def test_within_the_window_the_first_error_in_rank_order_is_raised(trainers):
    error = failed(trainers.late.call([0.3, 0.2, 0.1, 0.0]))
    assert str(error.exception) == "rank 0"
    assert list(error.failures) == [0, 1, 2, 3]


def test_a_time_limit_that_ends_first_raises_the_earlier_error(trainers):
    GATE.clear()
    error = failed(trainers.hang.options(timeout=0.3).call([1]))
    assert "gpus=0,2-3 had not answered" in first_line(error)
    GATE.set()


def test_an_error_made_by_hand_is_as_it_was():
    error = ActorError(ValueError("x"), "mine")
    assert (error.failures, error.message) == ({}, "mine")
    assert str(error).startswith("mine\n Traceback")


@pytest.mark.parametrize("own", [False, True])
def test_errors_that_only_follow_from_anothers_come_last_and_are_folded(trainers, own):
    error = failed(trainers.collective.call(own))
    title = (
        "Actor call trainers.collective failed on 1 of 4 ranks: gpus=2; in consequence the collectives of gpus=0-1,3"
    )
    assert error.summary.startswith(f"{title} broke off (host ")
    assert "\n" not in error.summary
    assert "ValueError: nan in batch 20" in error.exception_formatted
    assert error.origin is not None
    assert error.origin[1] == 2
    assert list(error.failures) == [0, 1, 2, 3]
    if not own:
        assert isinstance(error.exception, ValueError)


def test_earlier_errors_come_first_and_simultaneous_ones_in_rank_order(trainers):
    assert str(failed(trainers.late.call([1.0, 0, 0, 0])).exception) == "rank 1"
    assert str(failed(trainers.late.call([0.02, 0.01, 0, 0])).exception) == "rank 0"
