"""Ctrl-C at any moment: it takes effect between messages only, and everything works afterwards."""

from typing import Any

import pytest

from monarch_nb.actor import ProcMesh
from monarch_nb.lifecycle import actor_spawn, proc_spawn
from monarch_nb.runtime import current_runtime
from tests.cluster.fault_tools import SOON, Program, Worker, still_works

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.mark.parametrize("times", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_interrupts_during_sends_lose_no_message(times: int) -> None:
    with Program("sends", times) as program:
        interrupts, cuts, calls, seconds = program.line("done").split()
        assert int(interrupts) == times
        assert int(cuts) > 0.9 * times
        assert int(calls) > times
        assert float(seconds) < 20  # no gap in the numbers delays later messages
        assert program.end() == 0


@pytest.mark.slow
def test_interrupts_during_spawn_heal_and_stop() -> None:
    with Program("cycles", 8) as program:
        cuts, rest = program.line("done").split(maxsplit=1)
        assert int(cuts) > 1
        assert rest == "[]"
        assert program.end() == 0


@pytest.mark.slow
def test_an_interrupt_at_any_step_leaves_no_later_heal_waiting() -> None:
    with Program("steps", 0, 12) as program:
        cuts, rest = program.line("done").split(maxsplit=1)
        assert rest == "[]"
        assert int(cuts) > 10
        assert program.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(1, 9))
def test_an_interrupt_at_every_step_leaves_no_later_heal_waiting(part: int) -> None:
    with Program("steps", part, 8) as program:
        cuts, rest = program.line("done", timeout=800).split(maxsplit=1)
        assert rest == "[]"
        assert int(cuts) > 100
        assert program.end() == 0


@pytest.mark.parametrize("function", ["start", "announce"])
def test_a_spawn_that_is_cut_off_leaves_no_process(host: Any, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def cut(*args: Any) -> Any:
        if function == "start":
            begin(*args)
        raise KeyboardInterrupt

    begin = proc_spawn.start
    monkeypatch.setattr(proc_spawn, function, cut)
    with pytest.raises(KeyboardInterrupt):
        host.spawn_procs(per_host={"gpus": 2}, name="cut")
    monkeypatch.undo()
    still_works(host)


def test_actors_whose_spawn_is_cut_off_are_stopped(duo: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*args: Any) -> Any:
        begin(*args)
        raise KeyboardInterrupt

    begin = actor_spawn.send_spawn
    monkeypatch.setattr(actor_spawn, "send_spawn", cut)
    with pytest.raises(KeyboardInterrupt):
        duo.spawn("cut", Worker)
    monkeypatch.undo()
    [state] = [state for state in current_runtime().meshes.values() if state.name == "cut"][-1:]
    assert state.stopped == "its spawn was interrupted"
    assert duo.spawn("whole", Worker).rank.call().get(SOON).values() == [0, 1]
