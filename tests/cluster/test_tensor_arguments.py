"""Tensors of which each rank has a value of its own, as arguments and results of endpoints."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import monarch_nb
from monarch_nb.actor import Actor, ActorError, Channel, ProcMesh, as_endpoint, endpoint, send
from monarch_nb.distributed import RankTensorError, TensorError
from tests.cluster.actor_tools import Faults, faults, spawned  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)


class Adder(Actor):
    """Has state that each call changes."""

    def __init__(self) -> None:
        self.calls = 0
        self.tensor: torch.Tensor | None = None

    @endpoint(propagate=lambda x, tree=None, local=None, times=1: x)
    def add(self, x: torch.Tensor, tree: object = None, local: object = None, times: int = 1) -> object:
        x += 1
        self.calls += 1
        return x, tree, local, times

    @endpoint
    def count(self, x: object = None) -> int:
        self.calls += 1
        return self.calls

    @endpoint
    def slow(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        x *= 10
        return x

    @endpoint(propagate=lambda x, times=1: {"same": x, "list": [x.clone(), torch.empty(2)]})
    def tree(self, x: torch.Tensor, times: int = 1) -> object:
        self.calls += 1
        return {"same": x, "list": [x * times, torch.full((2,), 7.0)]}

    @endpoint(propagate=lambda x: x.clone())
    def picky(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            raise ValueError("too much")
        return x + 1

    @endpoint(propagate="cached")
    def shapes(self, x: torch.Tensor) -> object:
        return x[1:], "text"

    @endpoint(propagate="inspect")
    def keep(self, x: torch.Tensor) -> None:
        self.tensor = x

    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def undeclared(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


class AsyncAdder(Adder):
    """The same on an event loop."""

    @endpoint(propagate=lambda x, tree=None, local=None, times=1: x)
    async def add(self, x: torch.Tensor, tree: object = None, local: object = None, times: int = 1) -> object:
        x += 1
        self.calls += 1
        return x, tree, local, times

    @endpoint
    async def count(self, x: object = None) -> int:
        self.calls += 1
        return self.calls

    @endpoint
    async def slow(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0.3)
        x *= 10
        return x

    @endpoint(propagate=lambda x, times=1: {"same": x, "list": [x.clone(), torch.empty(2)]})
    async def tree(self, x: torch.Tensor, times: int = 1) -> object:
        self.calls += 1
        return {"same": x, "list": [x * times, torch.full((2,), 7.0)]}

    @endpoint(propagate=lambda x: x.clone())
    async def picky(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            raise ValueError("too much")
        return x + 1

    @endpoint(propagate="cached")
    async def shapes(self, x: torch.Tensor) -> object:
        return x[1:], "text"

    @endpoint(propagate="inspect")
    async def keep(self, x: torch.Tensor) -> None:
        self.tensor = x

    @endpoint
    async def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "hosts_of_actors")


@pytest.fixture(params=[Adder, AsyncAdder], ids=["sync", "async"])
def adders(procs: ProcMesh, request: pytest.FixtureRequest) -> Any:
    return procs.spawn("adders", request.param)


@pytest.fixture
def rank(procs: ProcMesh) -> Any:
    """0 on rank 0, 1 on rank 1."""
    return procs.rank_tensor("gpus")


def both(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, gpus=rank).tolist() for rank in range(2)]


def test_each_actor_gets_its_ranks_value_in_the_same_memory(adders: Any, rank: Any) -> None:
    tree = [rank, {"more": rank * 2}]
    local = torch.ones(1)
    answers = adders.add.call(rank, tree, local, times=3).get(30)
    for index, (x, nested, ones, times) in enumerate(answers.values()):
        assert (int(x), int(nested[0]), int(nested[1]["more"])) == (index + 1, index + 1, 2 * index)
        assert (ones.tolist(), times) == ([1], 3)
        assert type(x) is torch.Tensor
    assert both(rank) == [1, 2]


def test_calls_and_operations_are_done_in_order(adders: Any, rank: Any) -> None:
    t = rank.float()
    slow = adders.slow.call(t)
    t += 5
    assert both(t) == [5, 15]
    counts = []
    for _ in range(5):
        counts += [adders.count.call(t), adders.count.call()]
        t += 1
    assert [future.get(30).values() for future in counts] == [[count, count] for count in range(1, 11)]
    assert slow.get(30).values() == [torch.tensor(0.0), torch.tensor(10.0)]
    assert both(t) == [10, 20]


def test_other_adverbs_take_tensors_too(procs: ProcMesh, adders: Any, rank: Any) -> None:
    assert sorted(int(future.get(30)[0]) for future in adders.add.stream(rank)) == [1, 2]
    adders.add.broadcast(rank)
    assert both(rank) == [2, 3]
    port, receiver = Channel[Any].open()
    send(adders.count, (rank,), {}, port)
    assert [receiver.recv().get(30) for _ in range(2)] == [3, 3]
    part = rank.slice_mesh(gpus=1).to_mesh(procs.slice(gpus=1))
    assert int(adders.slice(gpus=1).add.call_one(part).get(30)[0]) == 4
    assert int(adders.slice(gpus=1).add.choose(part).get(30)[0]) == 5
    with monarch_nb.Stream("other").activate(), pytest.raises(RankTensorError, match="WRONG_STREAM"):
        adders.add.call(rank)


def test_tensors_of_other_processes_are_refused_at_once(adders: Any, rank: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: adders.add.choose(rank),
        lambda: adders.slice(gpus=0).add.call(rank),
        lambda: adders.slice(gpus=0).add.rref(rank),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"on the 2 processes of (?s:.)* and the call is for 1 of them"):
            call()
    for other_procs in spawned(2, "others"):
        with pytest.raises(ValueError, match="these actors on processes of 'others'"):
            other_procs.spawn("elsewhere", Adder).add.call(rank)
    assert adders.count.call(rank).get(30).values() == [1, 1]


def test_the_failure_of_a_tensor_is_that_of_the_call(adders: Any, rank: Any) -> None:
    lost = torch.stack([rank, rank]).index_select(0, rank * 5)  # rank 1 has no element 5
    failed = r"index_select.default failed on rank 1 of (?s:.)*test_tensor_arguments.py"
    calls: list[Callable[[], object]] = [
        lambda: adders.count.call(lost).get(30),
        lambda: [future.get(30) for future in adders.count.stream(lost)],
        lambda: monarch_nb.inspect(adders.picky.rref(lost)),
    ]
    for call in calls:
        with pytest.raises(TensorError, match=failed):
            call()
    adders.count.broadcast(lost)
    assert adders.count.call().get(30).values() == [4, 1]  # rank 1 has not run those


def test_an_error_of_an_actor_is_raised_by_its_call(adders: Any, rank: Any) -> None:
    with pytest.raises(ActorError, match="too much"):
        adders.picky.call(rank + 200).get(30)
    assert both(rank + 1) == [1, 2]


def test_what_endpoints_return_is_the_value_of_a_tensor(adders: Any, procs: ProcMesh, rank: Any) -> None:
    t: Any = rank + torch.ones(())
    result = adders.tree.rref(t, times=5)
    assert isinstance(result["same"], monarch_nb.Tensor)
    result["same"].add_(1)  # shares the memory of the argument
    assert both(t) == [2, 3]
    assert both(result["list"][0]) == [5, 10]
    assert both(result["list"][1] + rank) == [[7, 7], [8, 8]]
    minus = as_endpoint(adders.undeclared, propagate=lambda x: x.clone())
    assert both(minus.rref(t)) == [1, 2]
    view, text = adders.shapes.rref(torch.stack([rank, rank + 5]))
    assert (both(view), text) == ([[5], [6]], "text")
    assert adders.keep.rref(t) is None
    part = rank.slice_mesh(gpus=1).to_mesh(procs.slice(gpus=1))
    assert monarch_nb.inspect(adders.slice(gpus=1).picky.rref(part)) == torch.tensor(2)


def test_endpoints_without_propagate_return_no_tensors(adders: Any, rank: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"adders.count.rref: (?s:.)*propagate=function"):
        adders.count.rref(rank)
    with pytest.raises(TypeError, match="times"):
        adders.picky.rref(rank, times=1)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("shape")

    with pytest.raises(KeyError, match="shape"):
        as_endpoint(adders.undeclared, propagate=broken).rref(rank)
    assert adders.count.call(rank).get(30).values() == [1, 1]


def test_an_endpoint_that_fails_is_a_failed_operation(adders: Any, rank: Any) -> None:
    result = adders.picky.rref(rank * 200) * 2
    for index in range(2):
        with pytest.raises(TensorError, match=r"adders.picky failed on rank 1 of (?s:.)*ValueError: too much"):
            monarch_nb.inspect(result, gpus=index)
    assert both(adders.picky.rref(rank)) == [1, 2]
    wrong = as_endpoint(adders.undeclared, propagate=lambda x: (x, x)).rref(rank)
    with pytest.raises(TensorError, match="unexpected number of returns"):
        monarch_nb.inspect(wrong)


def test_tensors_go_on_after_actors_that_have_stopped_or_were_cancelled(procs: ProcMesh, rank: Any) -> None:
    for kind in (Adder, AsyncAdder):
        adders: Any = procs.spawn("stopped", kind)
        late = adders.count.call(adders.slow.call(rank) and rank)
        late.cancel()
        assert both(rank + 1) == [1, 11]
        adders.stop().get(30)
        with pytest.raises(Exception, match="stopped"):
            adders.count.call(rank).get(30)
        rank //= 10
        assert both(rank) == [0, 1]


def call_often(adders: Any, t: object) -> None:
    for _ in range(100):  # a process that was killed may answer once more
        adders.count.call(t).get(30)


def test_a_lost_actor_does_not_hold_up_its_mesh(faults: Faults) -> None:  # noqa: F811 - a fixture
    for procs in spawned(2, "mortal"):
        adders: Any = procs.spawn("mortals", Adder)
        with procs.activate() as mesh:
            t = torch.ones(2)
        assert both(t) == [[1, 1]] * 2
        adders.slice(gpus=1).end.broadcast()
        with pytest.raises(Exception, match=r"SIGKILL|lost|ended|killed"):
            call_often(adders, t)
        assert adders.slice(gpus=0).count.call_one().get(30) > 0
        monarch_nb.heal_mesh(procs)
        again = mesh.rank_tensor("gpus")
        assert both(again) == [0, 1]
    faults.left()


class Holder(Actor):
    """Has a tensor from the beginning."""

    def __init__(self, x: torch.Tensor, *, more: object) -> None:
        self.x, self.more = x, more

    @endpoint
    def tensors(self) -> object:
        return self.x, self.more


def test_spawned_actors_get_copies_of_their_ranks_values(procs: ProcMesh, rank: Any) -> None:
    with procs.activate():
        holders: Any = procs.spawn("holders", Holder, rank + 1, more=[torch.ones(1)])
    rank += 5
    assert holders.tensors.call().get(30).values() == [(torch.tensor(index + 1), [torch.ones(1)]) for index in range(2)]
    part = rank.slice_mesh(gpus=1).to_mesh(procs.slice(gpus=1))
    holder: Any = procs.slice(gpus=1).spawn("holder", Holder, part, more=part)
    assert holder.tensors.call_one().get(30) == (torch.tensor(6), torch.tensor(6))
    with pytest.raises(ValueError, match="the call is for 1 of them"):
        procs.slice(gpus=1).spawn("holder", Holder, rank, more=1)


def test_functions_in_processes_take_tensors(procs: ProcMesh, rank: Any) -> None:
    assert procs.run(torch.Tensor.add_, rank, 5).get(30).values() == [torch.tensor(5), torch.tensor(6)]
    assert both(rank) == [5, 6]
