"""`put`: one copy of a value per host for all readers, each with its own snapshot."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monarch_nb
from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch_nb.rdma import BufferDroppedError, OwnerLostError, Put, put
from tests.cluster.actor_tools import Faults
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class User(Actor):
    """Reads values that others put."""

    def __init__(self) -> None:
        self.value: Any = None

    @endpoint
    def total(self, value: Put[Any]) -> float:
        self.value = value.get()
        return float(self.value["x"].sum())

    @endpoint
    def change(self, value: Put[Any]) -> float:
        array = value.get()["x"]
        array += 1
        return float(array.sum())

    @endpoint
    def own(self, count: int) -> Put[Any]:
        self.value = put({"x": np.full(count, 2.0)})
        return self.value

    @endpoint
    def memory(self) -> tuple[int, int]:
        """Returns this process's private and shared bytes."""
        smaps = Path("/proc/self/smaps_rollup").read_text()
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in smaps.splitlines()[1:]}
        return sizes["Private_Dirty"] + sizes["Private_Clean"], sizes["Shared_Clean"] + sizes["Shared_Dirty"]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="put_procs")
    yield mesh
    mesh.stop().get()


@pytest.fixture(scope="module")
def users(procs: ProcMesh) -> Any:
    return procs.spawn("users", User)


def test_all_ranks_get_what_was_put_then_and_each_its_own(procs: ProcMesh, users: Any) -> None:
    array = np.ones(100_000)
    value = procs.put({"x": array, "name": "weights"})
    array[:] = 7
    assert list(users.total.call(value).get(30).values()) == [100_000.0] * 2
    assert list(users.change.call(value).get(30).values()) == [200_000.0] * 2
    assert list(users.total.call(value).get(30).values()) == [100_000.0] * 2
    assert value.get()["name"] == "weights"


def test_a_large_value_is_in_memory_once(users: Any) -> None:
    size = 64 << 20
    value = put({"x": np.ones(size, np.uint8)})
    before = users.memory.call().get(30).values()
    assert list(users.total.call(value).get(30).values()) == [float(size)] * 2
    for (private, shared), (old_private, old_shared) in zip(users.memory.call().get(30).values(), before, strict=True):
        assert private - old_private < size // 2, "no process has a copy of its own"
        assert shared - old_shared > size // 2


def test_values_of_actors_are_for_others_too_and_end_with_them(procs: ProcMesh, users: Any) -> None:
    brief = procs.slice(gpus=0).spawn("brief", User)
    value = brief.own.call_one(1000).get(30)
    assert "brief" in value.owner
    assert users.slice(gpus=1).total.call_one(value).get(30) == 2000.0
    assert value.get()["x"].sum() == 2000.0
    with pytest.raises(ValueError, match="is dropped in the process that put it"):
        value.drop()
    brief.stop().get()
    with pytest.raises(BufferDroppedError, match="was dropped: put it again"):
        value.get()


def test_a_dropped_value_says_so_and_earlier_gets_stay_valid(users: Any) -> None:
    value = put({"x": np.ones(50_000)})
    snapshot = value.get()
    value.drop()
    value.drop()
    assert snapshot["x"].sum() == 50_000.0
    with pytest.raises(ActorError, match="BufferDroppedError"):
        users.total.call(value).get(30)


@pytest.mark.slow
def test_values_that_nobody_refers_to_stay_until_there_are_too_many(users: Any) -> None:
    with monarch_nb.configured(rdma_put_kept=3_000_000):
        first = users.total.call(put({"x": np.ones(100_000)}))
        assert list(first.get(30).values()) == [100_000.0] * 2, "it is used while the call that brings it is under way"
        kept = put({"x": np.ones(100_000)})
        pickled = []
        for _ in range(6):
            value = put({"x": np.ones(100_000)})
            pickled.append(value.__reduce_ex__(2))
            del value
            gc.collect()
        revived = [_revive(form) for form in pickled]
        until(lambda: sum(map(_is_dropped, revived)) >= 3)  # three of 800 kB fit; another thread drops the others
        assert not _is_dropped(revived[-1]), "the newest stays"
        assert not _is_dropped(kept), "what somebody refers to stays"


def _revive(form: Any) -> Put[Any]:
    value: Put[Any] = Put.__new__(Put)
    value.__setstate__(form[2])
    return value


def _is_dropped(value: Put[Any]) -> bool:
    try:
        value.get()
    except BufferDroppedError:
        return True
    return False


def test_a_value_goes_with_the_killed_process_that_put_it(users: Any, faults: Faults) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="short")
    mortal = procs.spawn("mortal", User)
    value, pid = mortal.own.call_one(1000).get(30), mortal.pid.call_one().get(30)
    snapshot = value.get()
    os.kill(pid, signal.SIGKILL)
    assert faults.next().mesh_name == "mortal"
    assert snapshot["x"].sum() == 2000.0
    with pytest.raises((OwnerLostError, BufferDroppedError)):
        value.get()
    procs.stop().get()
