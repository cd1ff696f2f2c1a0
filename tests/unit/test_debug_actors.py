"""Actors that stop in the debugger, on threads of this process: their records, and how they resume."""

import linecache
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import ActorError, ProcMesh, shutdown_context, this_proc
from monarch_nb.debug import DebugError, QuitDebugger
from monarch_nb.debug.verbs import BreakLine
from monarch_nb.mesh import state_of
from monarch_nb.mesh.mesh_events import MeshEvents, MeshStopped
from monarch_nb.runtime import current_runtime
from monarch_nb.store import describe
from monarch_nb.testing import in_process_host
from tests.cluster import debug_tools
from tests.cluster.debug_tools import SECONDS, Caller, Looper, Owner, Trainer, doubled, line, resume_all, stopped

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield in_process_host().spawn_procs(per_host={"gpus": 3}, name="debugged")
    shutdown_context()


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> Any:
    return procs.spawn("trainers", Trainer)


@pytest.fixture(autouse=True)
def nothing_stays_stopped(trainers: Any) -> Iterator[None]:
    yield
    resume_all()


def test_a_breakpoint_stops_the_actor_and_tells_all_about_the_place(trainers: Any) -> None:
    future = trainers.step.call(1)
    records = stopped(3)
    assert [stop.point for stop in records] == [(0,), (1,), (2,)]
    stop = records[0]
    assert (stop.name, stop.labels, stop.endpoint, stop.reason) == ("trainers", ("gpus",), "step", "breakpoint()")
    assert (stop.frame.function, stop.frame.text) == ("Trainer.step", "breakpoint()")
    assert stop.frame.file.endswith("debug_tools.py")
    assert len(stop.stack) == 1, "frames of the engine are hidden"
    assert "        doubled = loss * 2" in stop.source
    assert stop.host
    assert stop.pid > 0
    debug.resume(trainers)
    assert list(future.get(SECONDS).values()) == [2, 4, 6]


def test_pdb_set_trace_stops_as_breakpoint_does(trainers: Any) -> None:
    future = trainers.slice(gpus=1).pdb_step.call_one()
    (record,) = stopped(1)
    assert record.reason == "pdb.set_trace()"
    assert debug.eval("where").values == {1: "'pdb'"}
    debug.resume()
    assert future.get(SECONDS) == "pdb"


def test_a_condition_stops_those_for_which_it_holds(trainers: Any) -> None:
    future = trainers.stop_if.call([2])
    (record,) = stopped(1)
    assert (record.rank, record.reason) == (2, "asked for")
    debug.resume()
    assert list(future.get(SECONDS).values()) == [0, 1, 2]


def test_one_rank_or_a_slice_can_be_asked_alone(trainers: Any) -> None:
    trainers.step.call(1)
    stopped(3)
    assert debug.group(trainers, gpus=2).eval("loss").values == {2: 3}
    assert debug.group("trainers", gpus=slice(0, 2)).eval("loss").values == {0: 1, 1: 2}
    assert debug.group(trainers.slice(gpus=1)).eval("loss").values == {1: 2}
    assert debug.group(trainers).diff("loss > 2") == [(True, [2]), (False, [0, 1])]


def test_an_external_breakpoint_counts_from_the_next_call_until_cleared(trainers: Any) -> None:
    trainer = trainers.slice(gpus=1)
    mark = debug.set_breakpoint(f"debug_tools.py:{line('result = total + value')}", trainer, condition="total > 2")
    assert [entry.number for entry in debug.breakpoints()] == [mark.number]
    future = trainers.quiet.call([1.0, 2.0, 3.0])
    (record,) = stopped(1)
    assert (record.rank, record.frame.text) == (1, "result = total + value")
    assert debug.eval("total").values == {1: 3.0}
    debug.clear_breakpoint(mark)
    debug.resume()
    assert list(future.get(SECONDS).values()) == [6.0, 6.0, 6.0]
    assert list(trainers.quiet.call([1.0, 2.0, 3.0]).get(SECONDS).values()) == [6.0, 6.0, 6.0]


def test_breakpoints_of_two_actors_in_one_process_do_not_mix(procs: ProcMesh, trainers: Any) -> None:
    second_mesh = procs.spawn("others", Trainer)
    debug.set_breakpoint("Trainer.add", trainers, condition="total > 100")
    debug.set_breakpoint("Trainer.add", second_mesh, condition="total > 0")
    assert list(trainers.quiet.call([1.0, 2.0]).get(SECONDS).values()) == [3.0] * 3
    future = second_mesh.quiet.call([1.0, 2.0])
    assert {record.name for record in stopped(3)} == {"others"}
    resume_all()
    future.get(SECONDS)
    second_mesh.stop().get(SECONDS)


def test_places_that_nobody_knows_are_refused(trainers: Any) -> None:
    with pytest.raises(DebugError, match="no code in this process comes from a file"):
        debug.set_breakpoint("no_such_file.py:3", trainers)
    with pytest.raises(DebugError, match="neither file:line, nor a function"):
        debug.set_breakpoint("Trainer.no_such_method", trainers)
    with pytest.raises(DebugError, match="does not exist"):
        debug.set_breakpoint("debug_tools.py:99999", trainers)
    with pytest.raises(SyntaxError):
        debug.set_breakpoint("Trainer.add", trainers, condition="total >")
    assert debug.breakpoints() == []


def test_an_async_actor_stops_only_its_loop_and_steps_over_awaits(procs: ProcMesh, trainers: Any) -> None:
    loopers = procs.spawn("loopers", Looper)
    future, ping = loopers.step.call(1), loopers.ping.call()
    stopped(3)
    assert not ping.done()
    assert list(trainers.steps_done.call().get(SECONDS).values())
    assert describe(loopers).counts == {"paused": 3}
    group = debug.group(loopers)
    for _ in range(3):
        group.next(timeout=SECONDS)
    assert {session.frame.text for session in group.sessions} == {"z = y + 1"}
    group.resume()
    assert list(future.get(SECONDS).values()) == [3, 3, 3]
    assert list(ping.get(SECONDS).values()) == ["pong"] * 3
    loopers.stop().get(SECONDS)


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (("next",), ["return more + 1"]),
        (
            ("step", "next", "next", "finish", "next"),
            [
                "async def later(self, x: int) -> int:",
                "import asyncio",
                "await asyncio.sleep(0.01)",
                "more = await self.later(x)",
                "return more + 1",
            ],
        ),
    ],
)
def test_steps_in_an_async_endpoint_never_enter_the_event_loop(
    procs: ProcMesh, steps: tuple[str, ...], lines: list[str]
) -> None:
    looper = procs.slice(gpus=0).spawn("looper", Looper)
    mark = debug.set_breakpoint(f"debug_tools.py:{line('more = await self.later(x)')}", looper)
    for _ in range(2):  # the second call runs on the thread of the loop as the first left it
        future = looper.nested.call_one(3)
        stopped(1)
        texts = []
        for step in steps:
            getattr(debug.group(looper), step)(timeout=SECONDS)
            (session,) = debug.sessions()
            texts.append(session.frame.text)
            assert session.event != "exception"
        assert texts == lines
        debug.resume()
        assert future.get(SECONDS) == 7
    debug.clear_breakpoint(mark)
    assert looper.nested.call_one(3).get(SECONDS) == 7
    looper.stop().get(SECONDS)


def test_a_front_ends_breakpoint_holds_in_functions_the_process_runs_itself(procs: ProcMesh) -> None:
    everywhere = debug.controller().breakpoints.set_everywhere
    assert everywhere([BreakLine(file=debug_tools.__file__, line=line("twice = 2 * x"))]) == {}
    future = procs.slice(gpus=1).run(doubled, 4)
    (record,) = stopped(1)
    assert (record.frame.function, record.rank) == ("doubled", 1)
    assert len(record.stack) == 1, "frames of the engine are hidden"
    assert debug.eval("x").values == {1: 4}
    assert everywhere((), release=True) == {}
    assert list(future.get(SECONDS).values()) == [8]


CELL = "def twice(x):\n    y = 2 * x\n    return y\n"


def test_cells_of_an_earlier_kernel_stop_in_the_next_one(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = "/tmp/ipykernel_1/123.py", "/tmp/ipykernel_2/123.py"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, before, "exec"), names)
    monkeypatch.setitem(linecache.cache, before, (len(CELL), None, CELL.splitlines(keepends=True), before))
    everywhere = debug.controller().breakpoints.set_everywhere
    assert everywhere([BreakLine(file=now, line=3)]) == {}
    future = procs.slice(gpus=0).run(names["twice"], 4)
    (record,) = stopped(1)
    assert (record.frame.file, record.frame.line) == (before, 3)
    debug.group().quit()
    assert everywhere(()) == {}
    with pytest.raises(ActorError, match="stopped at line 3 of a cell in twice"):
        future.get(SECONDS)


def test_a_breakpoint_in_a_constructor_stops_before_the_first_message(procs: ProcMesh) -> None:
    late = procs.spawn("late", Trainer, True)
    future = late.steps_done.call()
    records = stopped(3)
    assert {record.endpoint for record in records} == {"__init__"}
    assert debug.eval("self.steps").values == {0: 0, 1: 0, 2: 0}
    debug.resume()
    assert list(future.get(SECONDS).values()) == [0, 0, 0]
    late.stop().get(SECONDS)


def test_a_breakpoint_in_supervise_stops_the_owner(procs: ProcMesh) -> None:
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    owner.start.call_one().get(SECONDS)
    (record,) = stopped(1)
    assert record.frame.function == "Owner.__supervise__"
    assert "on purpose" in str(debug.eval("told").values[0])
    debug.resume()
    owner.stop().get(SECONDS)


def test_an_actor_of_the_controllers_own_process_stops_too() -> None:
    local: Any = this_proc().spawn("here", Trainer)
    future = local.step.call_one(5)
    (record,) = stopped(1)
    assert record.name == "here"
    assert debug.eval("loss").values == {0: 5}
    debug.resume()
    assert future.get(SECONDS) == 10
    local.stop().get(SECONDS)


def test_a_stop_knows_the_calls_that_wait_for_it(procs: ProcMesh, trainers: Any) -> None:
    caller = procs.slice(gpus=1).spawn("caller", Caller)
    future = caller.ask.call_one(trainers.slice(gpus=0), 3)
    (record,) = stopped(1)
    assert (record.name, record.rank) == ("trainers", 0)
    assert future.wait_id in record.chain
    debug.resume()
    assert future.get(SECONDS) == 6
    caller.stop().get(SECONDS)


def test_stops_on_a_mesh_taken_over_leave_the_list() -> None:
    procs = in_process_host().spawn_procs(per_host={"gpus": 1}, name="shared")
    trainer = procs.spawn("taken", Trainer)
    future = trainer.step.call_one(1)
    stopped(1)
    state = state_of(procs)
    state.stopped = "taken over by the kernel of other.ipynb"
    current_runtime().part(MeshEvents).publish(MeshStopped(state))
    assert debug.table() == "nothing is stopped"
    state.stopped = None
    assert debug.controller().breakpoints.set_everywhere((), release=True) == {}
    assert future.get(SECONDS) == 2


def test_quit_ends_the_endpoint_with_an_error_and_the_actor_lives(trainers: Any) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    stopped(1)
    debug.group(trainers).quit()
    with pytest.raises(ActorError) as caught:
        future.get(SECONDS)
    assert isinstance(caught.value.exception, QuitDebugger)
    assert f"stopped at debug_tools.py:{line('breakpoint()', 2)}" in str(caught.value.exception)
    assert isinstance(trainers.slice(gpus=0).steps_done.call_one().get(SECONDS), int)


def test_quit_in_a_task_ends_its_endpoint_and_the_actor_lives(procs: ProcMesh) -> None:
    looper = procs.slice(gpus=0).spawn("looper", Looper)
    future = looper.gathered.call_one()
    stopped(1)
    debug.group(looper).quit()
    with pytest.raises(ActorError) as caught:
        future.get(SECONDS)
    assert isinstance(caught.value.exception, QuitDebugger)
    assert looper.ping.call_one().get(SECONDS) == "pong"
    looper.stop().get(SECONDS)


def test_stacks_of_processes_are_those_of_all_their_actors(procs: ProcMesh, trainers: Any) -> None:
    others: Any = procs.slice(gpus=0).spawn("others", Trainer)
    futures = [trainers.slice(gpus=1).step.call(1), others.step.call(1)]
    stopped(2)
    text = debug.stacks(procs)
    assert text.startswith("2  Trainer.step"), "without the library's frames on both sides"
    assert text.endswith("1  idle  [gpus=2]")
    assert debug.stacks(trainers).startswith("1  Trainer.step")
    resume_all()
    for future in futures:
        future.get(SECONDS)
    others.stop().get(SECONDS)


def test_stacks_of_a_loop_are_those_of_endpoints_and_tasks(procs: ProcMesh) -> None:
    looper: Any = procs.slice(gpus=0).spawn("looper", Looper)
    future = looper.gathered.call_one()
    stopped(1)
    text = debug.stacks(looper)
    assert text.startswith("1  Looper.gathered")
    assert "1  Looper.stop" in text, "the thread is in another task"
    resume_all()
    future.get(SECONDS)
    looper.stop().get(SECONDS)


def test_the_table_names_stopped_ranks_and_those_that_are_not(trainers: Any) -> None:
    trainers.slice(gpus=slice(0, 2)).step.call(1)
    future = trainers.slice(gpus=2).wait_long.call_one()
    stopped(2)
    assert debug.controller().stopped.wait(SECONDS, lambda: "runs wait_long, at debug_tools.py" in debug.table())
    assert f"2 of 3  at debug_tools.py:{line('breakpoint()', 2)} in Trainer.step  trainers gpus=0-1" in debug.table()
    assert "wait_long" in debug.stacks(trainers)
    from monarch_nb.lifecycle import interrupt

    interrupt(trainers.slice(gpus=2))
    with pytest.raises(ActorError):
        future.get(SECONDS)


def test_nothing_is_stopped_is_an_error_that_says_where_to_look(trainers: Any) -> None:
    with pytest.raises(DebugError, match=r"monarch.debug.sessions"):
        debug.eval("x")
    assert debug.table() == "nothing is stopped"
