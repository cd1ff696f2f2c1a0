"""heal_mesh: the very same mesh works again, for everybody who holds it."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    heal_mesh,
    this_proc,
)
from monarch_nb.supervision import HealError
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

    @endpoint
    def heard(self) -> list[list[int]]:
        return self.healed

    @endpoint
    def wait(self, port: Port[str]) -> None:
        port.send("waiting")
        threading.Event().wait(30)

    def __healed__(self, points: Any) -> None:
        self.healed.append([point.rank for point in points])


class Holder(Actor):
    """Holds references to actors of others."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.part = mesh.slice(gpus=slice(1, 2))
        self.one = mesh.slice(gpus=1)

    @endpoint
    def ask(self) -> list[int]:
        part, one = self.part.add.call().get(20), self.one.add.call_one().get(20)
        return [*self.mesh.add.call().get(20).values(), *part.values(), one]

    @endpoint
    def try_ask(self) -> str:
        try:
            return str(self.mesh.add.call().get(20).values())
        except SupervisionError as error:
            return type(error).__name__

    @endpoint
    def heal(self) -> bool:
        return heal_mesh(self.mesh) is self.mesh


class Parent(Actor):
    """Its __init__ makes its child; so a re-created one has a child of its own again."""

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


class FailsLater(Actor):
    """Cannot be re-created once the file is there."""

    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            raise ValueError("not again")

    @endpoint
    def boom(self) -> None:
        raise ValueError("boom")

    @endpoint
    def ping(self) -> str:
        return "pong"


@pytest.fixture
def killed(kill: Kill, faults: Faults) -> Kill:
    """Kills processes, and claims the failure that comes of it."""

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


def test_a_killed_process_and_its_actors_come_back(own_procs: ProcMesh, counters: Any, killed: Kill) -> None:
    part, flat = counters.slice(gpus=1), counters.flatten("all")
    assert counters.add.call().get(20).values() == [12, 12]
    before = counters.process.call().get(20).values()
    killed(own_procs.slice(gpus=1))
    with pytest.raises(SupervisionError):
        counters.add.call().get(20)
    assert heal_mesh(counters) is counters
    assert counters.add.call().get(20).values() == [14, 12]  # the survivor kept its state, the other began anew
    assert part.add.call_one().get(20) == 14
    assert flat.add.call().get(20).values() == [16, 16]
    after = counters.process.call().get(20).values()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert own_procs.spawn("more", Counter, 0).rank.call().get(20).values() == [0, 1]  # type: ignore[attr-defined]


def test_several_that_died_together_come_back(quad: ProcMesh, kill: Kill, faults: Faults) -> None:
    workers: Any = quad.spawn("workers", Counter, 0)

    def call_until_told() -> None:
        while True:
            workers.process.call().get(20)

    for victims in ((1, 2), (0, 3), (1, 2, 3)):
        before = workers.process.call().get(20).values()
        told: set[int] = set()
        for rank in victims:
            kill(quad.slice(gpus=rank))
        with pytest.raises(SupervisionError):
            call_until_told()  # of the first: the others may not be known yet
        heal_mesh(workers)
        after = workers.process.call().get(20).values()
        assert [rank for rank in range(4) if before[rank] != after[rank]] == list(victims)
        assert workers.rank.call().get(20).values() == [0, 1, 2, 3]
        while told != set(victims):
            told.update(faults.next().crashed_ranks)


def test_survivors_are_told_who_is_new(own_procs: ProcMesh, counters: Any, killed: Kill) -> None:
    counters.add.call().get(20)
    killed(own_procs.slice(gpus=0))
    heal_mesh(counters)
    assert counters.heard.call().get(20).values() == [[], [[0]]]


def test_a_failed_actor_comes_back_in_its_living_process(counters: Any, faults: Faults) -> None:
    before = counters.process.call().get(20).values()
    counters.add.call().get(20)
    fail(counters, 1, faults)
    heal_mesh(counters)
    assert counters.process.call().get(20).values() == before
    assert counters.add.call().get(20).values() == [14, 12]


def test_healing_what_is_well_changes_nothing(own_procs: ProcMesh, counters: Any) -> None:
    before = counters.process.call().get(20).values()
    counters.add.call().get(20)
    heal_mesh(counters)
    heal_mesh(counters.slice(gpus=0))
    heal_mesh(own_procs)
    assert counters.process.call().get(20).values() == before
    assert counters.add.call().get(20).values() == [14, 14]
    assert counters.heard.call().get(20).values() == [[], []]


def test_healing_processes_brings_all_their_actors_back(own_procs: ProcMesh, counters: Any, killed: Kill) -> None:
    others: Any = own_procs.spawn("others", Counter, 100)
    others.add.call().get(20)
    killed(own_procs.slice(gpus=0))
    with pytest.raises(SupervisionError):
        others.add.call().get(20)
    assert heal_mesh(own_procs) is own_procs
    assert counters.add.call().get(20).values() == [12, 12]
    assert others.add.call().get(20).values() == [101, 102]


def test_references_held_elsewhere_work_again(own_procs: ProcMesh, quad: ProcMesh, counters: Any, killed: Kill) -> None:
    holders: Any = quad.slice(gpus=slice(0, 2)).spawn("holders", Holder, counters)
    assert holders.slice(gpus=0).ask.call_one().get(20) == [12, 16, 12, 14]
    killed(own_procs.slice(gpus=1))
    assert holders.try_ask.call().get(20).values() == ["SupervisionError"] * 2
    heal_mesh(counters)
    asked = holders.slice(gpus=1).ask.call_one().get(20)
    assert asked[1] == 16, "the new rank begins anew"
    # A call of a holder that had not heard of the death yet has failed, but was run by the ranks that live.
    assert all(value >= before for value, before in zip(asked, [14, 16, 12, 14], strict=True))
    holders.stop().get(20)


def test_any_holder_of_a_reference_may_heal(own_procs: ProcMesh, quad: ProcMesh, counters: Any, killed: Kill) -> None:
    holder: Any = quad.slice(gpus=0).spawn("holder", Holder, counters)
    assert holder.try_ask.call_one().get(20) == "[12, 12]"
    killed(own_procs.slice(gpus=0))
    assert holder.heal.call_one().get(20)
    assert holder.try_ask.call_one().get(20) == "[12, 14]"
    assert counters.add.call().get(20).values() == [14, 16]
    holder.stop().get(20)


def test_calls_under_way_fail_and_are_not_repeated(
    own_procs: ProcMesh, counters: Any, kill: Kill, faults: Faults
) -> None:
    port, receiver = Channel[str].open()
    calls = counters.slice(gpus=1).wait.call_one(port), counters.slice(gpus=1).add.call_one()
    assert receiver.recv().get(20) == "waiting"
    kill(own_procs.slice(gpus=1))
    for call in calls:
        with pytest.raises(SupervisionError, match="sig=9"):
            call.get(20)
    faults.next()
    heal_mesh(counters)
    assert counters.add.call().get(20).values() == [12, 12]
    for call in calls:
        with pytest.raises(SupervisionError):
            call.get(20)
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.1)


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


def test_many_may_ask_for_the_same_heal_at_once(own_procs: ProcMesh, counters: Any, killed: Kill) -> None:
    killed(own_procs.slice(gpus=1))
    errors: list[BaseException] = []

    def heal() -> None:
        try:
            heal_mesh(counters)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=heal) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert counters._state.incarnation(1) == 1
    assert counters.add.call().get(20).values() == [12, 12]


def test_healing_over_and_over_is_refused(quad: ProcMesh, faults: Faults) -> None:
    counters: Any = quad.slice(gpus=slice(0, 2)).spawn("counters", Counter, 0)
    for _ in range(3):
        fail(counters, 1, faults)
        heal_mesh(counters)
    fail(counters, 1, faults)
    with pytest.raises(HealError, match=r"healed 3 times within 60 s and failed again.*boom"):
        heal_mesh(counters)
    assert counters.slice(gpus=0).add.call_one().get(20) == 1


def test_a_second_failure_during_a_heal_is_raised_by_it(quad: ProcMesh, faults: Faults, tmp_path: Any) -> None:
    path = str(tmp_path / "there")
    actors: Any = quad.slice(gpus=slice(0, 2)).spawn("actors", FailsLater, path)
    assert actors.ping.call().get(20).values() == ["pong"] * 2
    fail(actors, 0, faults)
    with open(path, "w"):
        pass
    with pytest.raises(HealError, match="not again"):
        heal_mesh(actors)
    assert actors.slice(gpus=1).ping.call_one().get(20) == "pong"
    os.unlink(path)
    heal_mesh(actors)
    assert actors.ping.call().get(20).values() == ["pong"] * 2


def test_the_newest_class_is_used(quad: ProcMesh, faults: Faults) -> None:
    made: Any = quad.slice(gpus=slice(0, 2)).spawn("made", globals()["Changing"])
    assert made.version.call().get(20).values() == [1, 1]
    fail(made, 1, faults)
    old = Changing
    try:
        globals()["Changing"] = define(2)
        heal_mesh(made)
        assert made.version.call().get(20).values() == [1, 2]
        assert made.slice(gpus=1).extra.call_one().get(20) == "new in 2"
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
