"""The debugger of a thread with real frames: commands at a stop, and where stepping leads."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from monarch_nb.debug import verbs
from monarch_nb.debug.records import QuitDebugger, Stopped
from monarch_nb.debug.session.thread import ThreadDebugger
from tests.unit.debug_tools import SECONDS, SESSION, Listener, debugged, go, source

FILE = "<program>"
TEXT = """\
class Box:
    __slots__ = ("slot",)
    def __init__(self):
        self.slot = 5

def inner(value):
    doubled = value * 2
    return doubled

def outer(numbers):
    total = 0
    stop()
    for number in numbers:
        total += inner(number)
    return total

def fails(x):
    try:
        return inner(x) / 0
    except ZeroDivisionError:
        return -1

box = Box()
result = outer([1, 2, 3])
failed = fails(1)
"""


def program(script: Callable[[Stopped], Iterable[verbs.Command]], **options: Any) -> tuple[Listener, dict[str, Any]]:
    return debugged(source(FILE, TEXT), script, **options)


def ask(*commands: verbs.Command, text: str = TEXT) -> tuple[list[verbs.CommandAnswer], dict[str, Any]]:
    """The answers to commands at `stop()`; then the program resumes."""
    first = [[*commands, go()]]
    listener, names = debugged(source(FILE, text), lambda record: first.pop() if first else [go()])
    return listener.answers, names


def evaluate(text: str, **options: Any) -> verbs.Evaluate:
    return verbs.Evaluate(session=SESSION, text=text, **options)


def pdb(text: str) -> verbs.Pdb:
    return verbs.Pdb(session=SESSION, text=text)


def position(record: Stopped) -> tuple[str, int]:
    return record.frame.function, record.frame.line


# -- stepping ----------------------------------------------------------------------------------------------------------


def walk(*motions: Any) -> list[tuple[str, int, str]]:
    remaining = list(motions)
    listener, _ = program(lambda record: [go(remaining.pop(0)) if remaining else go()])
    return [(*position(record), record.note) for record in listener.stops]


def test_steps_go_into_over_and_out_of_functions() -> None:
    assert walk("over", "over", "in", "over", "out") == [
        ("outer", 12, ""),
        ("outer", 13, ""),
        ("outer", 14, ""),
        ("inner", 6, "--Call--"),
        ("inner", 7, ""),
        ("inner", 8, "--Return--"),
    ]


def test_until_leaves_a_loop() -> None:
    assert walk("over", "over", "until")[-1] == ("outer", 15, "")


def test_a_step_counts_from_the_frame_that_is_looked_at() -> None:
    script = iter([[go("over")], [go("over")], [go("in")], [verbs.Select(session=SESSION, by=-1), go("over")], [go()]])
    listener, _ = program(lambda record: next(script))
    assert position(listener.stops[-1]) == ("outer", 13)


def test_a_step_off_the_end_of_the_code_says_so() -> None:
    listener, _ = debugged(source(FILE, "stop()\nlast = 1\n"), lambda record: [go("over")])
    assert [(record.frame.line, record.note) for record in listener.stops] == [(1, ""), (2, ""), (2, "--Return--")]
    assert listener.events[-1] == ("over", "the endpoint has ended")


def test_exceptions_stop_a_step_and_show_where_they_were_raised() -> None:
    text = "def f():\n    return 1 / 0\n\ntry:\n    stop()\n    f()\nexcept ZeroDivisionError:\n    done = 1\n"
    listener, names = debugged(source(FILE, text), lambda record: [go("over" if record.number < 4 else "continue")])
    third = listener.stops[2]
    assert third.note == "ZeroDivisionError: division by zero"
    assert third.frame.function == "f"
    assert third.selected_frame.function == "<module>"
    assert listener.stops[3].selected_frame.line == 7, "and the next step counts from the live frame"
    assert names["done"] == 1


def test_where_exceptions_are_raised_they_stop_if_that_is_wished() -> None:
    listener, names = program(lambda record: [go()], arm=lambda debugger: debugger.stop_where_raised(True))
    assert [position(record) for record in listener.stops] == [("outer", 12), ("fails", 19)]
    assert listener.stops[1].note == "ZeroDivisionError: division by zero"
    assert names["failed"] == -1


def test_a_line_is_jumped_over() -> None:
    answers, names = ask(verbs.Jump(session=SESSION, line=15))
    assert answers[0].resumed
    assert names["result"] == 0


def test_quit_ends_what_runs_and_says_where() -> None:
    with pytest.raises(QuitDebugger, match=r"stopped at <program>:12 in outer"):
        program(lambda record: [verbs.Quit(session=SESSION)])


def test_commands_after_one_that_resumes_are_refused() -> None:
    first = [[go(), evaluate("1")]]
    listener, _ = program(lambda record: first.pop())
    assert [(answer.resumed, answer.error) for answer in listener.answers] == [
        (True, ""),
        (True, "the rank is not stopped any more"),
    ]


# -- breakpoints -------------------------------------------------------------------------------------------------------


def stops_at(line: int, **options: Any) -> list[dict[str, Any]]:
    """The local variables at each stop at a breakpoint; `stop()` resumes."""
    stops: list[dict[str, Any]] = []

    def arm(debugger: ThreadDebugger) -> None:
        debugger.add_breakpoint(FILE, line, **options)

    def script(record: Stopped) -> Iterable[verbs.Command]:
        yield verbs.GetVariables(session=SESSION)
        yield go()

    listener, _ = program(script, arm=arm)
    for answer in listener.answers:
        if answer.variables:
            stops.append({variable.name: variable.value.text for variable in answer.variables})
    return stops[1:]


def test_a_breakpoint_stops_each_time_its_condition_holds() -> None:
    assert [stop["number"] for stop in stops_at(14, condition="number > 1")] == ["2", "3"]
    assert [stop["number"] for stop in stops_at(14, hit_condition="% 2")] == ["2"]
    assert [stop["number"] for stop in stops_at(14, ignore=2)] == ["3"]
    assert [stop["number"] for stop in stops_at(14, temporary=True)] == ["1"]
    assert [stop["value"] for stop in stops_at(6, function="inner")] == ["1", "2", "3", "1"]


def test_a_log_message_is_printed_where_the_thread_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert stops_at(14, log="{number} of {len(numbers)}") == []
    assert capsys.readouterr().out == "1 of 3\n2 of 3\n3 of 3\n"


def test_a_breakpoint_set_at_a_stop_holds_in_running_functions() -> None:
    script = iter([[go("over")], [go("over")], [go("in")], [pdb("b 15"), go()], [go()]])
    listener, _ = program(lambda record: next(script))
    assert (position(listener.stops[-1]), listener.stops[-1].reason) == (("outer", 15), "breakpoint 1")
    assert [(record.event, record.breakpoint) for record in listener.stops][-2:] == [("call", 0), ("line", 1)]


def test_there_is_no_breakpoint_where_there_is_no_line() -> None:
    with pytest.raises(ValueError, match=f"Line {FILE}:99 does not exist"):
        program(lambda record: [go()], arm=lambda debugger: debugger.add_breakpoint(FILE, 99))


# -- commands at a stop ------------------------------------------------------------------------------------------------


def test_expressions_and_statements_run_in_the_inspected_frame() -> None:
    answers, names = ask(
        evaluate("[total + n for n in numbers]"),
        evaluate("total = 100", statement=True),
        evaluate("print('said')", statement=True),
        evaluate("total", statement=True),
        evaluate("nothing"),
        verbs.Select(session=SESSION, by=-1),
        evaluate("box.slot"),
    )
    assert answers[0].value is not None
    assert answers[0].value.text == "[1, 2, 3]"
    assert (answers[1].value, answers[1].error) == (None, "")
    assert (answers[2].value, answers[2].text) == (None, "said\n")
    assert answers[3].value is not None
    assert answers[3].value.text == "100"
    assert answers[4].error == "NameError: name 'nothing' is not defined"
    assert (answers[5].current, answers[5].source[answers[5].frame.line - answers[5].first]) == (  # type: ignore[union-attr]
        0,
        "result = outer([1, 2, 3])",
    )
    assert answers[6].value is not None
    assert answers[6].value.text == "5"
    assert names["result"] == 112


def test_a_frame_that_there_is_not_is_told() -> None:
    answers, _ = ask(evaluate("1", frame=7))
    assert answers[0].error == "there is no frame 7: the outermost is 0, the innermost 1"


def test_the_source_of_a_file_or_cell_is_given_whole() -> None:
    answers, _ = ask(verbs.GetSource(session=SESSION, file=FILE), verbs.GetSource(session=SESSION, file="nowhere.py"))
    assert isinstance(answers[0], verbs.SourceText)
    assert answers[0].content == TEXT
    assert "is not to be had" in answers[1].error


HOLDING = """\
class Box:
    __slots__ = ("slot",)

def f():
    box = Box()
    box.slot = 5
    many = list(range(1000))
    by_name = {"a": [1, {"b": 2}], 3: "c", (1, 2): "t"}
    few = {7}
    stop()
    return box.slot, by_name, many[1], few, hidden

hidden = 1
result = f()
"""


def script_of(
    *makers: Callable[[list[verbs.CommandAnswer]], verbs.Command],
) -> tuple[list[verbs.CommandAnswer], dict[str, Any]]:
    """Commands that depend on the answers to earlier ones; each is posted when the one before is done."""
    remaining = list(makers)
    answers: list[verbs.CommandAnswer] = []
    debuggers: list[ThreadDebugger] = []

    class Script(Listener):
        def stopped(self, debugger: ThreadDebugger) -> None:
            debuggers.append(debugger)
            self._next()

        def _next(self) -> None:
            command = remaining.pop(0)(answers) if remaining else go()

            def send(answer: verbs.CommandAnswer) -> None:
                if not isinstance(command, verbs.Go):
                    answers.append(answer)
                    self._next()

            debuggers[-1].post(command, send)

    _, names = debugged(source(FILE, HOLDING), lambda record: (), listener=Script(lambda record: ()))
    return answers, names


def reference(answers: list[verbs.CommandAnswer], name: str, nth: int = 0) -> int:
    return next(variable.reference for variable in answers[nth].variables if variable.name == name)


def test_scopes_hold_variables_which_hold_others_a_page_at_a_time() -> None:
    def children(name: str, nth: int, **page: int) -> Callable[[list[verbs.CommandAnswer]], verbs.Command]:
        return lambda answers: verbs.GetVariables(session=SESSION, reference=reference(answers, name, nth), **page)

    answers, _ = script_of(
        lambda _: verbs.GetVariables(session=SESSION),
        lambda _: verbs.GetScopes(session=SESSION),
        children("many", 0, start=990, count=100),
        children("by_name", 0),
        children("'a'", 3),
        children("box", 0),
        children("few", 0),
        lambda _: verbs.GetVariables(session=SESSION, reference=999),
    )
    of_locals = {item.name: (item.value.type, item.named, item.indexed) for item in answers[0].variables}
    assert of_locals == {
        "box": ("program.Box", 1, 0),
        "many": ("list", 0, 1000),
        "by_name": ("dict", 3, 0),
        "few": ("set", 0, 1),
    }
    assert isinstance(answers[1], verbs.Scopes)
    assert [(item.name, item.expensive) for item in answers[1].scopes] == [("Locals", False), ("Globals", True)]
    assert [item.name for item in answers[2].variables] == [str(n) for n in range(990, 1000)]
    assert answers[2].total == 1000
    assert [(item.name, item.expression) for item in answers[3].variables] == [
        ("'a'", "by_name['a']"),
        ("3", "by_name[3]"),
        ("(1, 2)", ""),
    ]
    assert [item.value.text for item in answers[4].variables] == ["1", "{'b': 2}"]
    assert [(item.name, item.value.text, item.expression) for item in answers[5].variables] == [
        ("slot", "5", "box.slot")
    ]
    assert [item.value.text for item in answers[6].variables] == ["7"]
    assert "there is no variable 999" in answers[7].error


def test_variables_and_what_they_hold_are_given_other_values() -> None:
    def assign(name: str, text: str, of: str = "") -> Callable[[list[verbs.CommandAnswer]], verbs.Command]:
        return lambda answers: verbs.Assign(
            session=SESSION, name=name, text=text, reference=reference(answers, of) if of else 0
        )

    def in_globals(answers: list[verbs.CommandAnswer]) -> verbs.Command:
        scopes = answers[-1]
        assert isinstance(scopes, verbs.Scopes)
        return verbs.Assign(session=SESSION, name="hidden", text="many[2]", reference=scopes.scopes[1].reference)

    answers, names = script_of(
        lambda _: verbs.GetVariables(session=SESSION),
        assign("slot", "6", of="box"),
        assign("1", "len(many)", of="many"),
        assign("'a'", "'other'", of="by_name"),
        assign("0", "1", of="few"),
        assign("few", "{8}"),
        assign("few", "nothing"),
        lambda _: verbs.GetScopes(session=SESSION),
        in_globals,
    )
    assert [answer.error for answer in answers[1:4]] == [""] * 3
    assert answers[4].error == "TypeError: a set cannot be changed"
    assert answers[6].error.startswith("NameError")
    assert names["result"] == (6, {"a": "other", 3: "c", (1, 2): "t"}, 1000, {8}, 2)


# -- pdb's language ----------------------------------------------------------------------------------------------------


def send(*lines: str) -> list[str]:
    """The answers of pdb to lines, at `stop()`."""
    answers, _ = ask(*map(pdb, lines))
    replies = []
    for answer in answers[: len(lines)]:
        value = [answer.value.text] if answer.value is not None else []
        error = [f"*** {answer.error}"] if answer.error else []
        replies.append("\n".join([answer.text.rstrip("\n")] * bool(answer.text) + value + error))
    return replies


def test_pdb_shows_stacks_arguments_and_source() -> None:
    stack, args, listing, more, function = send("w", "a", "l 1, 3", "l", "ll")
    assert f"> {FILE}(12)outer()" in stack
    assert args == "numbers = [1, 2, 3]"
    assert listing.splitlines()[0].split() == ["1", "class", "Box:"]
    assert more.splitlines()[0].split()[0] == "4", "a listing goes on"
    assert " 12  \t->" in function.replace(" ->", "->").replace("\t->", "\t->") or "->" in function


def test_pdb_goes_up_and_down_the_stack() -> None:
    up, value, down, bottom = send("u", "p result_of if False else box.slot", "d", "d")
    assert up.startswith(f"> {FILE}(24)<module>()")
    assert value == "5"
    assert down.startswith(f"> {FILE}(12)outer()")
    assert bottom == "*** Newest frame"


def test_pdb_sets_changes_lists_and_clears_breakpoints() -> None:
    lines = ("b 14, number > 2", "b", "condition 1 number > 1", "ignore 1 1", "disable 1", "enable 1", "tbreak inner")
    first, listed, condition, ignored, disabled, enabled, function = send(*lines)
    assert first == f"Breakpoint 1 at {FILE}:14"
    assert "stop only if number > 2" in listed
    assert condition == "New condition set for breakpoint 1."
    assert ignored == "Will ignore next 1 crossing of breakpoint 1."
    assert disabled == f"Disabled breakpoint 1 at {FILE}:14"
    assert enabled == f"Enabled breakpoint 1 at {FILE}:14"
    assert function.startswith("Breakpoint 2 at ")
    assert send("b 14", "cl 1", "cl 1", "b 15", "cl") == [
        f"Breakpoint 1 at {FILE}:14",
        f"Deleted breakpoint 1 at {FILE}:14",
        "*** Breakpoint 1 already deleted",
        f"Breakpoint 2 at {FILE}:15",
        f"Deleted breakpoint 2 at {FILE}:15",
    ]
    assert send("b 14", f"cl {FILE}:14", f"cl {FILE}:14")[1:] == [
        f"Deleted breakpoint 1 at {FILE}:14",
        f"*** There is no breakpoint at {FILE}:14",
    ]
    assert send("cond 99 x", "b 999", "until 3")[0] == "*** Breakpoint number 99 out of range"


def test_pdb_runs_statements_aliases_and_several_commands_of_a_line() -> None:
    assert send("total = 7 ;; p total", "alias pt p total * %1", "pt 3", "!n = 5", "n2 = 6 if True else 0", "p n2") == [
        "7",
        "",
        "21",
        "",
        "",
        "6",
    ]
    assert send("whatis total", "interact", "commands 1", "debug 1", "run", "1 +")[0] == "<class 'int'>"
    errors = send("interact", "commands 1", "debug 1", "run", "j x", "retval")
    assert all(error.startswith("*** ") for error in errors), errors


def test_pdb_steps_as_the_debugger_does() -> None:
    lines = iter(["n", "n", "s", "until", "r", "retval", "c"])
    listener, _ = program(lambda record: [pdb(next(lines)), *([go()] if record.number == 6 else [])])
    assert [position(record) for record in listener.stops] == [
        ("outer", 12),
        ("outer", 13),
        ("outer", 14),
        ("inner", 6),
        ("inner", 7),
        ("inner", 8),
    ]
    assert listener.answers[-2].text == "2\n"


def test_a_pending_exception_of_a_blocked_thread_blocks_no_tracing() -> None:
    blocked = threading.Lock()
    blocked.acquire()

    def block() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            blocked.acquire()
            while True:
                pass

    thread = threading.Thread(target=block, daemon=True)
    thread.start()
    try:
        # As code outside the library does it; Python 3.11 would then let a traced thread into no function.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        listener, _ = program(lambda record: [go()])
    finally:
        blocked.release()
        thread.join(SECONDS)
    assert [record.frame.function for record in listener.stops] == ["outer"]
