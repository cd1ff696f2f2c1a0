"""heal_mesh: the same mesh works again, for all its holders."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    heal_mesh,
    this_proc,
)
from monarch_nb.mesh.mesh_events import MeshEvents, MeshHealed
from monarch_nb.runtime import current_runtime
from monarch_nb.supervision import Driver, HealError
from tests.cluster.actor_tools import Faults

Kill = Callable[[ProcMesh], None]

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Counter(Actor):
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.count = start
        self.step = step
        self.healed: list[list[int]] = []

    @endpoint
    def add(self) -> int:
        self.count += self.step
        return self.count

    @endpoint
    def process(self) -> str:
        return context().actor_instance.proc_id

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def boom(self) -> None:
        raise ValueError("boom")


class Parent(Actor):
    """Its __init__ creates its child, so a re-created parent has a new child."""

    def __init__(self) -> None:
        self.child: Any = this_proc().spawn("child", Counter, 10)

    @endpoint
    def child_of(self) -> Any:
        return self.child

    @endpoint
    def ask(self) -> int:
        return int(self.child.add.call_one().get(20))

    @endpoint
    def boom(self) -> None:
        raise ValueError("boom")


class Caller(Actor):
    @endpoint
    def ranks_of(self, counters: Any) -> list[int]:
        return list(counters.rank.call().get(10).values())


@pytest.fixture
def kill_procs(kill: Kill, faults: Faults) -> Kill:
    """Kills processes, and claims the resulting failure."""

    def end(procs: ProcMesh) -> None:
        kill(procs)
        faults.next()

    return end


def fail(mesh: Any, rank: int, faults: Faults) -> None:
    mesh.slice(gpus=rank).boom.broadcast()
    faults.next()


@pytest.fixture
def counters(own_procs: ProcMesh) -> Any:
    return own_procs.spawn("counters", Counter, 10, step=2)


def test_a_killed_process_and_its_actors_come_back(own_procs: ProcMesh, counters: Any, kill_procs: Kill) -> None:
    part, flat = counters.slice(gpus=1), counters.flatten("all")
    assert counters.add.call().get(20).values() == [12, 12]
    before = counters.process.call().get(20).values()
    kill_procs(own_procs.slice(gpus=1))
    with pytest.raises(SupervisionError):
        counters.add.call().get(20)
    assert heal_mesh(counters) is counters
    assert counters.add.call().get(20).values() == [14, 12]  # the survivor kept its state, the other started anew
    assert part.add.call_one().get(20) == 14
    assert flat.add.call().get(20).values() == [16, 16]
    after = counters.process.call().get(20).values()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert own_procs.spawn("more", Counter, 0).rank.call().get(20).values() == [0, 1]  # type: ignore[attr-defined]


def test_an_incarnation_that_an_unrecorded_heal_gave_before_still_calls(
    own_procs: ProcMesh, counters: Any, kill_procs: Kill
) -> None:
    callers: Any = own_procs.spawn("callers", Caller)
    caller = callers.slice(gpus=1)
    record = current_runtime().part(Driver).machine._records.meshes[callers._state.uid]
    for _ in range(2):
        kill_procs(own_procs.slice(gpus=1))
        status = record.at(1)  # what the next controller knows if one ended before it recorded its heal:
        record.put(1, status.state, 0, status.cause, status.failure_id)
        callers._state.incarnations = {}
        heal_mesh(own_procs)
        assert caller.ranks_of.call_one(counters).get(20) == [0, 1]


def test_a_heal_without_a_thread_ends_with_that_reason(
    own_procs: ProcMesh, counters: Any, kill_procs: Kill, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "monarch-heal":
            raise RuntimeError("can't start new thread")
        start(thread)

    kill_procs(own_procs.slice(gpus=1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        heal = current_runtime().part(Driver).heal(own_procs._state.uid)
        with pytest.raises(HealError, match="no thread could be started for the heal: can't start new thread; end"):
            heal.get(20)
    heal_mesh(own_procs)
    assert counters.add.call().get(20).values() == [12, 12]


class Hooked(Actor):
    """Its survivors count heals; `fails` makes their hook raise."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.heals = fails, 0

    def __healed__(self, points: Any) -> None:
        self.heals += 1
        if self.fails:
            raise ValueError("no copy of the weights")

    @endpoint
    def count(self) -> int:
        return self.heals


def test_a_hook_that_raises_keeps_no_other_from_running(own_procs: ProcMesh, kill_procs: Kill) -> None:
    meshes: list[Any] = [own_procs.spawn(f"hooked{fails}", Hooked, fails) for fails in (True, False)]
    healed: list[str] = []
    listeners = current_runtime().part(MeshEvents).listeners
    listeners.append(lambda event: healed.append(event.mesh.name) if isinstance(event, MeshHealed) else None)
    kill_procs(own_procs.slice(gpus=1))
    with pytest.raises(ActorError, match="no copy of the weights"):
        heal_mesh(own_procs)
    listeners.pop()
    assert [mesh.count.call().get(20).values() for mesh in meshes] == [[1, 0], [1, 0]]
    assert healed == [own_procs._state.name, "hookedTrue", "hookedFalse"]


def test_a_failed_actor_comes_back_in_its_living_process(counters: Any, faults: Faults) -> None:
    before = counters.process.call().get(20).values()
    counters.add.call().get(20)
    fail(counters, 1, faults)
    heal_mesh(counters)
    assert counters.process.call().get(20).values() == before
    assert counters.add.call().get(20).values() == [14, 12]


def test_healing_processes_brings_all_their_actors_back(own_procs: ProcMesh, counters: Any, kill_procs: Kill) -> None:
    second: Any = own_procs.spawn("others", Counter, 100)
    second.add.call().get(20)
    kill_procs(own_procs.slice(gpus=0))
    with pytest.raises(SupervisionError):
        second.add.call().get(20)
    assert heal_mesh(own_procs) is own_procs
    assert counters.add.call().get(20).values() == [12, 12]
    assert second.add.call().get(20).values() == [101, 102]


def test_a_child_comes_back_through_its_parents_constructor(quad: ProcMesh, faults: Faults) -> None:
    parent: Any = quad.slice(gpus=0).spawn("parent", Parent)
    old = parent.child_of.call_one().get(20)
    assert parent.ask.call_one().get(20) == 11
    parent.boom.broadcast()
    faults.next()
    heal_mesh(parent)
    assert parent.ask.call_one().get(20) == 11
    with pytest.raises(RuntimeError):
        old.add.call_one().get(20)


def test_the_newest_class_is_used(quad: ProcMesh, faults: Faults) -> None:
    mesh: Any = quad.slice(gpus=slice(0, 2)).spawn("made", globals()["Changing"])
    assert mesh.version.call().get(20).values() == [1, 1]
    fail(mesh, 1, faults)
    old = Changing
    try:
        globals()["Changing"] = define(2)
        heal_mesh(mesh)
        assert mesh.version.call().get(20).values() == [1, 2]
        assert mesh.slice(gpus=1).extra.call_one().get(20) == "new in 2"
    finally:
        globals()["Changing"] = old


def define(number: int) -> Any:
    class Changing(Actor):
        @endpoint
        def version(self) -> int:
            return number

        @endpoint
        def boom(self) -> None:
            raise ValueError("boom")

        if number > 1:

            @endpoint
            def extra(self) -> str:
                return f"new in {number}"

    Changing.__qualname__ = "Changing"
    return Changing


Changing = define(1)


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """Classes of this module travel by value, as those of a notebook do: the processes have no new version on disk."""
    import sys

    from monarch_nb.wire import register_pickle_by_value, unregister_pickle_by_value

    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


def test_only_meshes_can_be_healed_and_none_that_was_stopped(quad: ProcMesh) -> None:
    with pytest.raises(TypeError, match="proc or actor mesh"):
        heal_mesh(3)
    counters: Any = quad.spawn("counters", Counter, 0)
    counters.stop("done with it").get(20)
    with pytest.raises(RuntimeError, match=r"counters was stopped \(done with it\)"):
        heal_mesh(counters)
