"""Streams of values of ranks' own, which ranks execute at the same time, on two real processes."""

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch_nb
from monarch_nb import debug
from monarch_nb.actor import Actor, ProcMesh, SupervisionError, endpoint
from monarch_nb.distributed import ContentsLostError, TensorError
from monarch_nb.lifecycle import interrupt
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import resume_all, stopped
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "streams")


@pytest.fixture
def rank(procs: ProcMesh) -> monarch_nb.Tensor:
    """0 on rank 0, 1 on rank 1."""
    return procs.rank_tensor("gpus")


def both(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, gpus=rank).tolist() for rank in range(2)]


@monarch_nb.remote(propagate="inspect")
def meet(flag: Path, peer_flag: Path) -> None:
    """Marks that it runs, and waits until another function does."""
    rank = torch.distributed.get_rank()
    Path(f"{flag}{rank}").touch()
    until(lambda: Path(f"{peer_flag}{rank}").exists())


@monarch_nb.remote(propagate="inspect")
def add_later(x: torch.Tensor, number: float, file: Path) -> None:
    until(file.exists)
    x.add_(number)


def test_functions_of_two_streams_run_at_the_same_time(procs: ProcMesh, tmp_path: Path) -> None:
    side = monarch_nb.Stream("other")
    with procs.activate():
        meet(tmp_path / "main", tmp_path / "other")
        with side.activate():
            meet(tmp_path / "other", tmp_path / "main")
            monarch_nb.inspect(torch.ones(1))
        monarch_nb.inspect(torch.ones(1))


def test_ranks_exchange_while_another_stream_computes(procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path) -> None:
    communication, file = monarch_nb.Stream("communication"), tmp_path / "go"
    x = rank + 1.0
    lent, borrow = communication.borrow(rank + 2, mutable=True)
    add_later(x, 5, file)
    with communication.activate():
        lent.reduce_("gpus")
        assert both(lent) == [5, 5]
    file.touch()
    borrow.drop()
    assert both(x) == [6, 7]


def test_borrowers_wait_for_lenders_and_lenders_for_the_drop(
    procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path
) -> None:
    x, side = rank + 1.0, monarch_nb.Stream("other")
    add_later(x, 1, tmp_path / "first")
    lent, borrow = side.borrow(x, mutable=True)
    with borrow, side.activate():
        lent.mul_(10)
        add_later(lent, 1, tmp_path / "second")
        copied = lent * 1
    x.mul_(2)
    future = monarch_nb.fetch_shard(x, gpus=1)
    (tmp_path / "first").touch()
    time.sleep(0.05)
    assert not future.done()
    (tmp_path / "second").touch()
    assert future.get(60).tolist() == 62
    with side.activate():
        assert both(copied) == [21, 31]


def test_values_go_from_stream_to_stream_in_order(procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path) -> None:
    x, side = rank + 1.0, monarch_nb.Stream("other")
    add_later(x, 1, tmp_path / "go")
    moved = x.to_mesh(procs, stream=side)
    x.mul_(0)
    (tmp_path / "go").touch()
    with side.activate():
        assert both(moved) == [2, 3]
    assert both(x) == [0, 0]


@pytest.mark.parametrize("begin", [0, 1])
def test_a_value_goes_to_a_stream_of_other_ranks(procs: ProcMesh, begin: int) -> None:
    side, first, receivers = monarch_nb.Stream("other"), procs.slice(gpus=0), procs.slice(gpus=slice(begin, 2))
    with first.activate():
        moved: Any = (torch.ones(2) * 3).to_mesh(receivers, stream=side)
    with receivers.activate(), side.activate():
        assert monarch_nb.inspect(moved + 1, gpus=1 - begin).tolist() == [4, 4]


def test_random_operations_draw_the_same_whatever_other_streams_do(procs: ProcMesh) -> None:
    streams = [monarch_nb.Stream(f"drawing {number}") for number in range(2)]

    @monarch_nb.remote(propagate=lambda count: torch.empty(3))
    def drawn(count: int) -> torch.Tensor:
        return torch.rand(count, 3, generator=torch.Generator().manual_seed(count))[-1]

    def draw() -> list[list[object]]:
        results: list[list[object]] = []
        with procs.activate():
            torch.manual_seed(3)
            draws: list[list[torch.Tensor]] = [[], []]
            for _ in range(30):
                for stream, values in zip(streams, draws, strict=True):
                    with stream.activate():
                        values.append(torch.rand(3) + drawn(50) + torch.nn.functional.dropout(torch.ones(3)))
            for stream, values in zip(streams, draws, strict=True):
                with stream.activate():
                    results.append(both(torch.stack(values)))
        return results

    first, second = draw()
    assert first != second
    assert [draw() == [first, second] for _ in range(3)] == [True] * 3


@monarch_nb.remote(propagate=lambda count: torch.empty(4))
def drawn_by_function(count: int) -> torch.Tensor:
    """Draws by operations of each kind: from views, by other operations, of numbers, and in a backward pass."""
    total = torch.zeros(4)
    for _ in range(count):
        weights = torch.nn.init.normal_(torch.empty(4)).requires_grad_()
        torch.nn.functional.dropout(weights * torch.rand(4), 0.5).sum().backward()
        assert weights.grad is not None
        total = total + weights.grad + torch.multinomial(torch.ones(9), 4) + torch.randperm(4) + torch.randint(5, (4,))
    return total


def test_functions_of_streams_draw_from_generators_of_their_own(procs: ProcMesh) -> None:
    streams = [monarch_nb.get_active_stream(), *(monarch_nb.Stream(f"functions {number}") for number in range(2))]

    def draw() -> list[list[object]]:
        results: list[list[object]] = []
        with procs.activate():
            torch.manual_seed(3)
            draws = []
            for stream in streams:
                with stream.activate():
                    draws.append([drawn_by_function(40) + torch.rand(4) for _ in range(3)])
            for stream, values in zip(streams, draws, strict=True):
                with stream.activate():
                    results.append(both(torch.stack(values)))
        return results

    first = draw()
    assert len({str(of_rank) for of_stream in first for of_rank in of_stream}) == 6
    assert [draw() == first for _ in range(4)] == [True] * 4


def test_generators_are_seeded_and_restored_on_their_stream(procs: ProcMesh) -> None:
    generators: Any = importlib.import_module("monarch.random")
    builtins_random: Any = importlib.import_module("monarch.builtins.random")
    seed_of = monarch_nb.remote(torch.initial_seed)
    with procs.activate():
        of_main = seed_of.call().get(60).values()
        with monarch_nb.Stream("seeded").activate():
            builtins_random.set_manual_seed_remote(5)
            state = generators.get_state()
            first = [both(torch.rand(2)), both(drawn_by_function(3))]
            generators.set_state(state)
            assert [both(torch.rand(2)), both(drawn_by_function(3))] == first
            assert seed_of.call().get(60).values() == [5, 5]
        assert seed_of.call().get(60).values() == of_main
        drawn = both(torch.rand(2))
        torch.manual_seed(4)
        with monarch_nb.Stream("seeded").activate():
            torch.rand(2)
    assert first[0] == [torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()] * 2
    assert drawn[0] != drawn[1]  # by the seed of the mesh


def test_actors_take_tensors_of_each_stream(procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path) -> None:
    class Adder(Actor):
        @endpoint
        def add(self, x: torch.Tensor, number: float) -> float:
            return float(x.add_(number).sum())

    adders, side = procs.spawn("adders", Adder), monarch_nb.Stream("other")
    x = rank + 1.0
    with procs.activate(), side.activate():
        y = torch.ones(1)
        assert adders.add.call(y, 2).get(60).values() == [3, 3]
        assert both(y) == [[3], [3]]
    add_later(x, 1, tmp_path / "go")
    waiting = adders.add.call(x, 2)
    (tmp_path / "go").touch()
    assert waiting.get(60).values() == [4, 5]


def test_more_streams_than_threads_share_them(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    streams = [monarch_nb.Stream(f"stream {number}") for number in range(20)]
    totals = []
    for number, stream in enumerate(streams):
        lent, borrow = stream.borrow(rank)
        with borrow, stream.activate():
            totals.append((lent + number).reduce("gpus"))
    for number, (stream, value) in enumerate(zip(streams, totals, strict=True)):
        with stream.activate():
            assert both(value) == [1 + 2 * number] * 2


def test_threads_have_the_names_of_their_streams(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    name: Any = monarch_nb.remote(lambda: threading.current_thread().name)
    with monarch_nb.timeline(procs) as recording, procs.activate(), monarch_nb.Stream("loading").activate():
        assert name.call().get(60).values() == ["stream loading"] * 2
    assert "stream loading" in {span.name for span in recording.spans(1)}


@monarch_nb.remote(propagate=lambda x: x.clone())
def paused(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    breakpoint()
    return doubled + 1


def test_a_breakpoint_on_a_stream_holds_no_other_stream_up(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    side = monarch_nb.Stream("paused")
    tensor = (rank + 2.0).to_mesh(procs, stream=side)
    try:
        with side.activate():
            waiting = monarch_nb.fetch_shard(paused(tensor), gpus=1)
            call = monarch_nb.remote(lambda x: float(x.sum())).call(tensor)
        assert {entry.thread for entry in stopped(2)} == {"stream paused"}
        assert both((rank + 1.0).reduce("gpus")) == [3, 3]
        assert debug.eval("doubled.item()").values == {0: 4.0, 1: 6.0}
        assert not waiting.done()
        debug.resume()
        assert waiting.get(60).tolist() == 7
        assert call.get(60).values() == [2, 3]
    finally:
        resume_all()


def test_an_interrupt_ends_what_each_stream_runs(procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path) -> None:
    side = monarch_nb.Stream("other")
    x = rank + 1.0
    y, borrow = side.borrow(rank + 2.0, mutable=True)
    for attempt in range(2):
        until(lambda: both(rank) == [0, 1])
        begun = [tmp_path / f"{stream}{attempt}" for stream in ("main", "other")]

        @monarch_nb.remote(propagate=lambda x, file: x.clone())
        def long(x: torch.Tensor, file: Path) -> torch.Tensor:
            Path(f"{file} {torch.distributed.get_rank()}").touch()
            time.sleep(100)
            return x

        results = [long(x, begun[0])]
        with side.activate():
            results.append(long(y, begun[1]))
            waiting = [monarch_nb.fetch_shard(results[1], gpus=1)]
        waiting.append(monarch_nb.fetch_shard(results[0], gpus=1))
        until(lambda begun=begun: all(Path(f"{path} {number}").exists() for path in begun for number in range(2)))
        interrupt(x.mesh.workers)
        for future in waiting:
            with pytest.raises(TensorError, match="KeyboardInterrupt"):
                future.get(60)
    with side.activate():
        assert both(y.reduce("gpus")) == [5, 5]
    borrow.drop()
    assert both(x.reduce("gpus")) == [3, 3]


def test_an_interrupt_frees_a_stream_that_waits_for_other_ranks(
    procs: ProcMesh, rank: monarch_nb.Tensor, tmp_path: Path
) -> None:
    side = monarch_nb.Stream("other")
    x, y = rank + 1.0, (rank + 2.0).to_mesh(procs, stream=side)

    @monarch_nb.remote(propagate="inspect")
    def left_alone(group: Any) -> None:
        if torch.distributed.get_rank() == 0:
            (tmp_path / "alone").touch()
            torch.distributed.barrier(group=group)

    with side.activate(), procs.activate():
        left_alone(rank.mesh.process_group("gpus"))
        end = monarch_nb.fetch_shard(y, gpus=0)
    assert monarch_nb.inspect(x + 1, gpus=0).tolist() == 2
    until((tmp_path / "alone").exists)  # an interrupt ends only what has begun
    with procs.activate():
        meet(tmp_path / "begun", tmp_path / "never")
    until(lambda: all((tmp_path / f"begun{number}").exists() for number in range(2)))
    interrupt(x.mesh.workers)
    with pytest.raises((TensorError, SupervisionError)):
        end.get(60)
    assert both(x.reduce("gpus")) == [3, 3]
    with side.activate(), procs.activate():
        assert both(torch.ones(1).reduce("gpus")) == [[2], [2]]


def test_streams_survive_a_collective_that_fails_on_one_rank(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    values, side = rank + 1, monarch_nb.Stream("other")
    tensor = (rank + 5).to_mesh(procs, stream=side)
    with side.activate():
        assert both(tensor) == [5, 6]

    def wrong(part: torch.Tensor) -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("only here")
        torch.distributed.barrier()

    for _ in range(2):
        with side.activate(), procs.activate():
            drawn = [torch.rand(2).reduce("gpus") for _ in range(5)]
        with pytest.raises(TensorError, match="only here"):
            rank.mesh.execute(wrong, values)
        assert both(values * 2) == [2, 4]
        assert both(values.reduce("gpus")) == [3, 3]
        del drawn
        with side.activate():
            assert both(tensor) == [5, 6]
            assert both(tensor.reduce("gpus")) == [11, 11]


def test_streams_of_a_healed_mesh_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    side = monarch_nb.Stream("other")

    def use(tensor: torch.Tensor) -> None:
        for _ in range(1000):
            monarch_nb.inspect(tensor + 1)

    for procs in spawned(2, "mortal"):
        for _ in range(2):
            t = procs.rank_tensor("gpus") + 1.0
            lent, borrow = side.borrow(t, mutable=True)
            with side.activate():
                lent.reduce_("gpus")
                assert both(lent) == [3, 3]
            os.kill(procs.run(os.getpid).get(30).values()[1], signal.SIGKILL)
            with side.activate(), pytest.raises((ContentsLostError, SupervisionError)):
                use(lent)
            monarch_nb.heal_mesh(procs)
            borrow.drop()
            with pytest.raises(ContentsLostError):
                monarch_nb.inspect(t)
            x = procs.rank_tensor("gpus") + 1.0
            lent, borrow = side.borrow(x, mutable=True)
            with borrow, side.activate():
                lent.reduce_("gpus")
            assert both(x) == [3, 3]


def test_streams_go_on_without_the_ranks_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    side = monarch_nb.Stream("other")
    for procs in spawned(3, "shrinking"):
        with procs.activate() as mesh, side.activate():
            tensor = torch.ones(1)
            assert monarch_nb.inspect(tensor.reduce("gpus"), gpus=2).tolist() == [3]
        os.kill(procs.run(os.getpid).get(30).values()[2], signal.SIGKILL)
        until(lambda tensor=tensor: tensor.reference.stream.lost is not None)
        rest = monarch_nb.heal_mesh(mesh, shrink=True)
        for part in (rest, procs.slice(gpus=slice(0, 2))):
            with part.activate():
                for stream in (side, monarch_nb.Stream("new"), monarch_nb.get_active_stream()):
                    with stream.activate():
                        assert both(torch.ones(1).reduce("gpus")) == [[2], [2]]
        with side.activate(), pytest.raises(ContentsLostError):
            monarch_nb.inspect(tensor)
