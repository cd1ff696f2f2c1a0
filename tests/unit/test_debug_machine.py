"""The decisions of a thread's debugger: no frame is involved, and nothing runs."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.debug.session.breakpoints import BreakpointTable, SourceLocation, filled_in, passed_often_enough
from monarch_nb.debug.session.debuggers import BreakpointSets
from monarch_nb.debug.session.machine import CommandError, DebugMachine, Paused, Resume, RunningThread, Stepping
from monarch_nb.debug.verbs import BreakLine, BreakSet

LOCATION = SourceLocation("train.py", 42, "step", 40)


def never(expression: str) -> object:
    raise AssertionError(f"{expression} is not to be evaluated")


def pause(machine: DebugMachine, depth: int = 3, event: str = "line") -> Paused:
    stop = machine.stops(event, depth, depth - 1)  # type: ignore[arg-type]
    assert stop is not None
    return stop


# -- running, paused, stepping -----------------------------------------------------------------------------------------


def test_a_thread_that_nothing_stops_need_not_be_traced() -> None:
    machine = DebugMachine()
    assert machine.quiet
    added = machine.breakpoints.add("train.py", 42)
    assert not machine.quiet
    machine.breakpoints.remove([added])
    machine.raised = True
    assert not machine.quiet


def test_a_step_resumes_and_ends_in_the_next_numbered_stop() -> None:
    machine = DebugMachine()
    assert pause(machine, event="asked").number == 1
    assert machine.go("over") == Resume("over", 2)
    assert machine.state == Stepping("over")
    second = pause(machine)
    assert (second.number, second.reason, second.note) == (2, "step", "")


def test_a_step_counts_from_the_frame_that_is_looked_at() -> None:
    machine = DebugMachine()
    pause(machine)
    machine.move(-1)
    assert machine.go("out") == Resume("out", 1)


def test_frames_are_looked_at_as_far_as_there_are_any() -> None:
    machine = DebugMachine()
    pause(machine)
    assert machine.move(-5).selected == 0
    with pytest.raises(CommandError, match="Oldest frame"):
        machine.move(-1)
    assert machine.move(9).selected == 2
    with pytest.raises(CommandError, match="Newest frame"):
        machine.move(1)
    with pytest.raises(CommandError, match="there is no frame 3"):
        machine.select(3)


def test_evaluating_at_a_stop_does_not_stop_again() -> None:
    machine = DebugMachine()
    machine.breakpoints.add("train.py", 42)
    pause(machine)
    assert machine.stops("asked", 9, 8) is None
    assert machine.at(LOCATION, never).stop is None


def test_a_forgotten_step_ends_nowhere_and_later_breakpoints_stop() -> None:
    machine = DebugMachine()
    pause(machine, event="asked")
    machine.go("over")
    machine.forget()
    assert machine.state == RunningThread()
    assert machine.stops("line", 3, 2) is None
    machine.breakpoints.add("train.py", 42)
    assert machine.at(LOCATION, never).stop is not None
    assert pause(machine).breakpoint == 1


@pytest.mark.parametrize("temporary", [False, True])
def test_a_breakpoint_removed_between_hit_and_stop_does_not_stop(temporary: bool) -> None:
    machine = DebugMachine()
    added = machine.breakpoints.add("train.py", 42, temporary=temporary)
    assert machine.at(LOCATION, never).stop is added
    machine.breakpoints.remove([added])
    machine.forget()
    assert (machine.stops("line", 3, 2) is not None) == temporary, "a temporary one is removed when it is hit"
    assert pause(machine, event="asked") if not temporary else machine.standing


def test_no_command_is_carried_out_by_a_thread_that_runs() -> None:
    machine = DebugMachine()
    for command in (lambda: machine.go("in"), lambda: machine.select(0), lambda: machine.jump(3)):
        with pytest.raises(CommandError, match="not stopped any more"):
            command()


def test_a_step_that_leaves_the_users_code_ends_nowhere() -> None:
    machine = DebugMachine()
    pause(machine)
    machine.go("in")
    assert machine.outermost_returns()
    assert isinstance(machine.state, RunningThread)
    assert not machine.outermost_returns()


def test_frames_of_a_failure_are_closed_by_any_resuming_command() -> None:
    machine = DebugMachine()
    pause(machine, event="failure")
    with pytest.raises(CommandError, match="nothing is run here"):
        machine.jump(3)
    machine.go("over")
    assert machine.quiet


def test_the_next_line_is_set_at_once_or_after_a_step() -> None:
    machine = DebugMachine()
    pause(machine, event="line")
    assert machine.jump(50) is None
    machine.go("continue")
    pause(machine, event="asked")
    assert machine.jump(50) == Resume("in", 2)
    assert machine.line_to_run() == 50
    assert machine.line_to_run() is None, "once"
    machine.cannot_jump("it is in a loop")
    assert pause(machine).note == "jump failed: it is in a loop"


def test_only_the_innermost_frame_can_run_another_line() -> None:
    machine = DebugMachine()
    pause(machine)
    machine.move(-1)
    with pytest.raises(CommandError, match="bottom frame"):
        machine.jump(3)


@given(
    st.lists(
        st.sampled_from(
            ["stop", "asked", "continue", "in", "over", "out", "until", "up", "down", "jump", "left", "end"]
        ),
        max_size=40,
    )
)
def test_after_every_event_a_thread_runs_steps_or_has_a_frame(words: list[str]) -> None:
    machine = DebugMachine()
    numbers = [0]
    for word in words:
        before = machine.standing
        try:
            if word in ("stop", "asked"):
                stop = machine.stops("line" if word == "stop" else "asked", 3, 2)
                assert (stop is None) == (before is not None)
                if stop is not None:
                    numbers.append(stop.number)
            elif word == "up":
                machine.move(-1)
            elif word == "down":
                machine.move(1)
            elif word == "jump":
                machine.jump(7)
            elif word == "left":
                machine.outermost_returns()
                assert machine.standing == before
            elif word == "end":
                machine.released()
                assert machine.standing is None
            else:
                resume = machine.go(word)  # type: ignore[arg-type]
                assert before is not None
                assert resume.frame == before.selected
                assert machine.standing is None
        except CommandError:
            assert machine.state == (before or machine.state)
        after = machine.standing
        assert after is None or 0 <= after.selected < after.depth
    assert numbers == list(range(len(numbers))), "each stop has the next number"


# -- breakpoints -------------------------------------------------------------------------------------------------------


def test_a_breakpoint_stops_at_its_line_and_says_so() -> None:
    machine = DebugMachine()
    machine.breakpoints.add("train.py", 42, condition="loss > 2")
    assert machine.at(SourceLocation("train.py", 43, "step", 40), never).stop is None
    assert machine.at(SourceLocation("other.py", 42, "step", 40), never).stop is None
    assert machine.at(LOCATION, lambda expression: expression == "loss > 2").stop is not None
    stop = pause(machine)
    assert (stop.reason, stop.breakpoint) == ("breakpoint 1, if loss > 2", 1)
    machine.go("in")
    assert pause(machine).breakpoint == 0


def test_a_false_condition_counts_a_hit_and_a_raising_one_stops() -> None:
    table = BreakpointTable()
    added = table.add("train.py", 42, condition="x")
    assert table.hit(LOCATION, lambda _: 0).stop is None
    assert added.hits == 1
    assert table.hit(LOCATION, lambda expression: {}[expression]).note == "its condition `x` raised KeyError: 'x'"


def test_ignored_passes_count_only_when_the_condition_holds() -> None:
    table = BreakpointTable()
    table.add("train.py", 42, condition="x", ignore=2)
    values = iter([1, 0, 1, 0, 1])
    assert [table.hit(LOCATION, lambda _: next(values)).stop is not None for _ in range(5)] == [False] * 4 + [True]


def test_disabled_breakpoints_do_nothing_and_temporary_ones_go_when_hit() -> None:
    table = BreakpointTable()
    disabled = table.add("train.py", 42, enabled=False)
    temporary = table.add("train.py", 42, temporary=True)
    assert table.hit(LOCATION, never).stop is temporary
    assert table.hit(LOCATION, never).stop is None
    assert list(table) == [disabled]


def test_a_function_breakpoint_stops_at_the_first_line_run_each_time() -> None:
    table = BreakpointTable()
    table.add("train.py", 40, function="step")
    lines = [SourceLocation("train.py", line, "step", 40) for line in (42, 43, 42)]
    assert [table.hit(location, never).stop is not None for location in lines] == [True, False, True]
    other_lines = [SourceLocation("train.py", 20, "step", 18), SourceLocation("train.py", 42, "other", 40)]
    assert not any(table.hit(location, never).stop for location in other_lines)


def test_a_log_message_does_not_stop_but_another_breakpoint_there_does() -> None:
    table = BreakpointTable()
    table.add("train.py", 42, log="loss {loss:.2f} of {name!r}")
    names = {"loss": 0.5, "name": "a"}
    hit = table.hit(LOCATION, names.__getitem__)
    assert (hit.stop, hit.logs) == (None, ("loss 0.50 of 'a'",))
    second = table.add("train.py", 42)
    assert table.hit(LOCATION, names.__getitem__).stop is second


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        ("{{x}} {x}", "{x} 3"),
        ("{y}", "{y: KeyError: 'y'}"),
        ("{x:nonsense}", "{x: ValueError: Invalid format specifier"),
        ("{x", "{x (expected '}' before end of string)"),
    ],
)
def test_errors_in_a_log_message_stand_in_its_text(message: str, text: str) -> None:
    assert filled_in(message, {"x": 3}.__getitem__).startswith(text)


@pytest.mark.parametrize(
    ("condition", "passes"),
    [
        ("", [1, 2, 3, 4, 5, 6]),
        ("3", [3]),
        ("== 3", [3]),
        (">3", [4, 5, 6]),
        (">= 3", [3, 4, 5, 6]),
        ("< 3", [1, 2]),
        ("<=3", [1, 2, 3]),
        ("!= 3", [1, 2, 4, 5, 6]),
        ("% 2", [2, 4, 6]),
        ("%0", []),
    ],
)
def test_a_hit_condition_holds_at_these_passes(condition: str, passes: list[int]) -> None:
    assert [number for number in range(1, 7) if passed_often_enough(condition, number)] == passes


def test_a_hit_condition_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="is no hit condition: write 3"):
        BreakpointTable().add("train.py", 42, hit_condition="often")


def test_breakpoints_of_one_setter_are_removed_together() -> None:
    table = BreakpointTable()
    table.add("a.py", 1, set_by="one")
    remaining = table.add("b.py", 1, set_by="other")
    table.remove(table.of("one"))
    assert list(table) == [remaining]
    assert table.lines == {"b.py": [1]}
    assert (table.has_file("a.py"), table.has_file("b.py")) == (False, True)
    assert table.add("c.py", 1).number == 3, "numbers are not given twice"


def test_breakpoints_of_a_departed_controller_go_and_the_next_ones_stay() -> None:
    process: Any = SimpleNamespace(cells={})
    breakpoints = BreakpointSets(process, lambda cell: pytest.fail("there are no actors"))
    lines = (BreakLine(file="train.py", line=3),)
    for controller in ("before", "now"):
        breakpoints.take(controller, BreakSet(version=1, lines=lines))
    breakpoints.drop(keep="now")
    assert set(msgspec.msgpack.decode(breakpoints.encoded())) == {"now"}
    breakpoints.drop()
    assert breakpoints.encoded() == b""
    breakpoints.take("before", BreakSet(version=1, lines=lines))
    assert breakpoints.encoded() == b"", "a late message of it is ignored"
