"""Failures keep their frames, within bounds, for inspection while the actor goes on."""

import importlib.util
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import ActorError, ProcMesh
from monarch_nb.config import configured
from monarch_nb.debug import DebugError
from monarch_nb.spmd import setup_torch_elastic_env
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import SECONDS, Holder, Trainer, resume_all, stopped

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with configured(debug_keep_failures=2, debug_keep_bytes=5_000_000):
        yield from spawned(2, "failing")


@pytest.fixture
def trainers(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("trainers", Trainer)
    yield mesh
    resume_all()
    mesh.stop().get(SECONDS)


def failed(call: Any) -> ActorError:
    with pytest.raises(ActorError) as caught:
        call.get(SECONDS)
    return caught.value


def test_frames_of_a_failure_are_available_while_the_actor_goes_on(trainers: Any) -> None:
    error = failed(trainers.divide.call(0))
    group = debug.post_mortem(error)
    (session,) = group.sessions
    assert session.post_mortem
    assert session.reason in {  # Python 3.14 leaves out the type
        "post-mortem: ZeroDivisionError: float division by zero",
        "post-mortem: ZeroDivisionError: division by zero",
    }
    assert (session.frame.function, session.frame.text) == ("Trainer.divide", "return numbers[0] / numbers[1]")
    assert group.eval("numbers").values == {0: "[1.0, 0]"}
    assert trainers.steps_done.call().get(SECONDS)
    group.resume()
    assert group.sessions == []


def test_the_rank_that_failed_is_the_one_that_is_opened(trainers: Any) -> None:
    failed(trainers.divide.call(0))
    error = failed(trainers.slice(gpus=1).divide.call_one(0))
    group = debug.post_mortem(error)
    assert [session.rank for session in group.sessions] == [1]
    group.resume()
    assert [session.rank for session in debug.post_mortem(trainers, gpus=0).sessions] == [0]


def test_only_the_newest_are_kept_and_they_can_be_let_go(trainers: Any) -> None:
    trainer = trainers.slice(gpus=0)
    errors = [failed(trainer.divide.call_one(0)) for _ in range(3)]
    trainer.steps_done.call_one().get(SECONDS)  # the caller gets the error before its frames are stored
    with pytest.raises(DebugError, match="no frames of this rank are kept"):
        debug.post_mortem(errors[0])
    debug.post_mortem(errors[1]).resume()
    debug.release(trainers)
    with pytest.raises(DebugError, match="no frames of this rank are kept"):
        debug.post_mortem(errors[2])


def test_frames_that_hold_much_are_let_go(trainers: Any) -> None:
    error = failed(trainers.slice(gpus=0).hold.call_one(10_000_000))
    deadline = time.monotonic() + SECONDS
    while True:  # the size is measured a moment later
        try:
            debug.post_mortem(error).resume()
        except DebugError:
            break
        assert time.monotonic() < deadline


def test_a_rank_frozen_at_errors_stops_at_the_raise_then_fails(trainers: Any) -> None:
    debug.freeze_on_error(trainers)
    future = trainers.slice(gpus=1).divide.call_one(0)
    (session,) = stopped(1)
    assert (session.rank, session.post_mortem, session.blocks_actor) == (1, True, True)
    assert debug.eval("numbers").values == {1: "[1.0, 0]"}
    assert not future.done()
    debug.resume()
    failed(future)
    debug.freeze_on_error(trainers, on=False)
    failed(trainers.slice(gpus=1).divide.call_one(0))


def test_opening_a_rank_without_failure_or_many_ranks_is_refused(trainers: Any) -> None:
    with pytest.raises(DebugError, match="it has not failed"):
        debug.post_mortem(trainers, gpus=0)
    with pytest.raises(DebugError, match="has 2 ranks: say which"):
        debug.post_mortem(trainers)


# -- objects that kept frames must release -----------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


@pytest.fixture
def holders(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("holders", Holder)
    yield mesh
    resume_all()
    mesh.stop().get(SECONDS)


@pytest.mark.parametrize("how", ["memory", "cause", "device"])
def test_frames_of_memory_errors_are_not_kept_and_others_are_released(holders: Any, how: str) -> None:
    holder = holders.slice(gpus=0)
    before = failed(holder.run_out.call_one("nothing"))
    assert holder.holds.call_one().get(SECONDS)
    debug.post_mortem(before).resume()
    error = failed(holder.run_out.call_one(how))
    assert not holder.holds.call_one().get(SECONDS)
    for failure in (before, error):
        with pytest.raises(DebugError, match="ran out of memory"):
            debug.post_mortem(failure)


def test_files_written_by_a_failed_call_are_flushed_despite_kept_frames(holders: Any, tmp_path: Path) -> None:
    error = failed(holders.slice(gpus=0).write.call_one(str(tmp_path / "out")))
    group = debug.post_mortem(error)
    holders.slice(gpus=0).children.call_one().get(SECONDS)  # flushed by the actor's next message
    assert (tmp_path / "out").read_text() == "all of it"
    assert group.eval("count").values == {0: 9}
    assert group.eval("unfinished").values == {0: "<TextIOWrapper: not kept, so that it ends>"}
    group.resume()


def test_a_connection_of_a_failed_call_is_closed_despite_kept_frames(holders: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        failed(holders.slice(gpus=0).connect.call_one(server.getsockname()[1]))
        peer, _ = server.accept()
        with peer:
            peer.settimeout(SECONDS)
            assert peer.recv(1) == b"", "closed"


def test_a_generator_of_a_failed_call_ends_despite_kept_frames(holders: Any, tmp_path: Path) -> None:
    failed(holders.slice(gpus=0).generate.call_one(str(tmp_path / "out")))
    holders.slice(gpus=0).children.call_one().get(SECONDS)
    assert (tmp_path / "out").read_text() == "ended"


@pytest.mark.slow
@needs_torch
def test_data_loader_processes_of_a_failed_call_end_despite_kept_frames(holders: Any) -> None:
    group = debug.post_mortem(failed(holders.slice(gpus=0).load.call_one()))
    assert holders.slice(gpus=0).children.call_one().get(SECONDS) == 0
    assert "not kept, so that it ends" in str(group.eval("batches").values[0])
    assert group.eval("len(numbers)").values == {0: 100}
    group.resume()


@pytest.mark.slow
@needs_torch
def test_tensors_are_kept_without_the_graph_that_led_to_them(holders: Any) -> None:
    group = debug.post_mortem(failed(holders.slice(gpus=0).backward.call_one()))
    assert group.eval("loss").values == {0: 6.0}
    assert group.eval("loss.grad_fn is None and inputs.requires_grad").values == {0: True}
    group.resume()


@pytest.mark.slow
@needs_torch
def test_a_group_that_is_destroyed_after_a_failure_closes_its_connections(procs: ProcMesh, holders: Any) -> None:
    setup_torch_elastic_env(procs)
    assert list(holders.join.call().get(SECONDS).values()) == [2, 2]
    first, second = holders.slice(gpus=0), holders.slice(gpus=1)
    error = failed(second.fail_in_group.call_one())
    call = first.wait_for_the_other.call_one()
    second.leave.call_one().get(SECONDS)
    assert "onnection" in call.get(SECONDS), "the other rank is told, though the frames are kept"
    group = debug.post_mortem(error)
    group.run("u")
    group.run("u")
    assert group.eval("group").values == {1: "<ProcessGroup: not kept, so that it ends>"}
    group.resume()
    first.leave.call_one().get(SECONDS)
