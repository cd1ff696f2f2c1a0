"""Lines that can be stopped at, marks in a gutter, and the focused rank: no kernel, and nothing that runs."""

import os
import threading
from typing import Any

import pytest

from monarch_kernel.dap.adapter import Adapter
from monarch_kernel.dap.announcer import Announcer
from monarch_kernel.dap.cluster import Focus
from monarch_kernel.dap.gutter import BreakableLine, BreakableLines, Gutter, MarkOptions, ranks_in
from monarch_kernel.dap.inspection import CellSources, FrameHandle, Handles, is_ours
from monarch_nb.debug import Frame, Stopped
from monarch_nb.debug.control.stopped_threads import StoppedThreads

CELL = """\
import math

class Trainer(Actor):
    scale = 2

    @endpoint
    def step(self, x):
        '''What it does.'''

        y = x + 1
        # a remark
        return helper(
            y,
        )

def helper(y):
    return y * 2

result = helper(1)
"""


def stopped(rank: int, line: int = 10, *, number: int = 1, name: str = "trainers") -> Stopped:
    return Stopped(
        session=f"s{rank}",
        number=number,
        address=f"h/p.{rank}.0",
        host="h",
        pid=rank,
        mesh=name,
        name=name,
        rank=rank,
        incarnation=0,
        labels=("gpus",),
        point=(rank,),
        sizes=(8,),
        stack=(Frame("train.py", line, "step"),),
    )


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clicked", "line"),
    [
        (10, BreakableLine(10, "actors", "Trainer")),
        (7, BreakableLine(10, "actors", "Trainer")),  # the head of a method: where it begins, past its docstring
        (6, BreakableLine(10, "actors", "Trainer")),
        (11, BreakableLine(12, "actors", "Trainer")),  # a remark: the next line that is run
        (17, BreakableLine(17, "anybody")),
        (16, BreakableLine(17, "anybody")),
        (19, BreakableLine(19, "notebook")),
        (4, BreakableLine(4, "notebook")),
        (99, BreakableLine(19, "notebook")),
    ],
)
def test_a_click_means_the_next_executable_line_and_finds_its_owner(clicked: int, line: BreakableLine) -> None:
    assert BreakableLines(CELL).at(clicked) == line


def test_a_class_is_recognised_as_actor_by_base_endpoints_or_namespace() -> None:
    text = "class A(Base):\n    def f(self):\n        return 1\n"
    assert BreakableLines(text).at(3).whose == "anybody"
    assert BreakableLines(text, lambda name: name == "A").at(3) == BreakableLine(3, "actors", "A")
    decorated = text.replace("    def", "    @x.endpoint(a=1)\n    def")
    assert BreakableLines(decorated).at(4) == BreakableLine(4, "actors", "A")


def test_invalid_python_can_be_stopped_at_where_it_was_clicked() -> None:
    assert BreakableLines("%%on workers\nx = (").at(2) == BreakableLine(2, "anybody")


# -- marks -------------------------------------------------------------------------------------------------------------


def gutter() -> Gutter:
    return Gutter(lambda path: BreakableLines(CELL))


def test_breakpoints_go_to_the_owner_of_the_code_they_are_in() -> None:
    marks = gutter()
    marks.set("cell", [{"line": 10}, {"line": 17}, {"line": 19}])
    assert [(mark.line, mark.actor) for mark in marks.of_mesh()] == [(10, "Trainer"), (17, "")]
    assert marks.of_notebook("cell") == [{"line": 17}, {"line": 19}]


def test_the_answer_about_a_breakpoint_stays_when_it_is_sent_again() -> None:
    marks = gutter()
    marks.set("cell", [{"line": 17}])
    marks.add("cell", 17, MarkOptions("@gpus=3 y > 1", "% 2", "y is {y}"))
    marks.set("cell", [{"line": 10}, {"line": 17}])
    (line,) = [mark for mark in marks.of_mesh() if mark.line == 17]
    assert (line.ranks, line.condition, line.hit_condition, line.log) == ("gpus=3", "y > 1", "% 2", "y is {y}")
    assert marks.of_notebook("cell") == [], "the breakpoint names ranks"
    with pytest.raises(LookupError, match="no breakpoint at line 3"):
        marks.add("cell", 3, MarkOptions())


@pytest.mark.parametrize(
    ("more", "says"), [(MarkOptions("y >"), "not an expression"), (MarkOptions("", "often"), "no hit condition")]
)
def test_senseless_breakpoints_are_refused_and_stop_nobody(more: MarkOptions, says: str) -> None:
    marks = gutter()
    request: dict[str, Any] = {"line": 17, "condition": more.condition, "hitCondition": more.hit_condition}
    (mark,) = marks.set("cell", [request])
    assert says in mark.row("cell")["message"]
    assert marks.of_mesh() == []
    with pytest.raises(ValueError, match=says):
        marks.add("cell", 17, more)


def test_a_mark_in_a_compiled_file_is_refused_and_stops_nobody() -> None:
    marks = gutter()
    (mark,) = marks.set("/lib/fast.cpython-311-x86_64-linux-gnu.so", [{"line": 3}])
    assert "compiled code has no lines" in mark.row("fast.so")["message"]
    assert marks.of_mesh() == []


def test_ranks_stand_before_a_condition() -> None:
    assert ranks_in("@gpus=0:4 loss > 1") == ("gpus=0:4", "loss > 1")
    assert ranks_in("@3") == ("3", "")
    assert ranks_in(" loss > 1 ") == ("", "loss > 1")


# -- the focused rank --------------------------------------------------------------------------------------------------


def test_the_focused_rank_is_a_thread_and_its_group_another() -> None:
    focus = Focus()
    records = [*(stopped(rank) for rank in range(4)), stopped(4, line=20)]
    assert focus.settle(records) is records[0]
    assert [(thread.number, thread.name) for thread in focus.threads(records)] == [
        (1, "trainers gpus=0 · train.py:10"),
        (2, "trainers gpus=1-3 · train.py:10"),
        (3, "trainers gpus=4 · train.py:20"),
    ]
    assert focus.targets(records, 1) == tuple(records[:4])
    assert focus.targets(records, 3) == (records[4],)
    focus.move(records[2], pinned=True)
    assert focus.settle(records) is records[2]
    assert focus.targets(records, 1) == (records[2],)


def test_front_ends_hear_of_a_rank_once_per_stop() -> None:
    focus = Focus()
    assert focus.settle([stopped(0)]) is not None
    assert focus.settle([stopped(0), stopped(1)]) is None
    assert focus.settle([stopped(0, number=2), stopped(1)]) is not None


def test_after_the_focused_rank_resumes_its_group_comes_then_the_largest() -> None:
    focus = Focus()
    records = [stopped(0), stopped(1), *(stopped(rank, line=20) for rank in (2, 3, 4))]
    assert focus.settle(records) is records[2]
    focus.move(records[0], pinned=False)
    focus.settle(records)
    assert focus.settle(records[1:]) is records[1]
    assert focus.settle(records[2:]) is records[2]
    assert focus.settle([]) is None
    assert focus.has_resumed([])
    assert not focus.has_resumed([]), "one event only"


def test_a_pinned_rank_is_awaited_and_found_at_its_next_stop() -> None:
    focus = Focus()
    records = [stopped(0), stopped(1)]
    focus.move(records[1], pinned=True)
    focus.settle(records)
    assert focus.settle(records[:1]) is None
    assert focus.has_resumed(records[:1])
    stop = stopped(1, line=30, number=2)
    assert focus.settle([records[0], stop]) is stop


def test_numbers_hold_for_one_stop_and_differ_from_another_debuggers() -> None:
    handles = Handles()
    number = handles.number(FrameHandle("s0", 1, 0))
    assert is_ours(number)
    assert not is_ours(7)
    assert handles.number(FrameHandle("s0", 1, 0)) == number
    handles.keep([stopped(0, number=2)])
    assert handles.get(number) is None


# -- events to front ends ----------------------------------------------------------------------------------------------


class Recorder:
    """Stands for an adapter and its ranks: logs each sending, and waits briefly for what must not happen meanwhile."""

    attached = False

    def __init__(self) -> None:
        self.controller = self
        self.stopped = StoppedThreads()
        self.log: list[str] = []
        self.sendings = threading.Semaphore(0)
        self.held = threading.Event()

    def events(self) -> list[Any]:
        self.log.append("sending")
        self.sendings.release()
        self.log.append("held meanwhile" if self.held.wait(0.2) else "sent")
        return []


@pytest.mark.timeout(20)
def test_front_ends_are_notified_before_or_after_ranks_resume_never_between() -> None:
    recorder = Recorder()
    announcer = Announcer(recorder, recorder, lambda event: None)  # type: ignore[arg-type]
    announcer.wake()
    assert recorder.sendings.acquire(timeout=10)
    with announcer.hold():
        recorder.held.set()
        recorder.log.append("held")
        announcer.wake()
        assert not recorder.sendings.acquire(timeout=0.2)
        recorder.held.clear()
    assert recorder.sendings.acquire(timeout=10)
    assert recorder.log == ["sending", "sent", "held", "sending"]
    announcer.close()


def test_cells_of_an_earlier_kernel_are_shown_as_current_ones() -> None:
    sources = CellSources()
    file = sources.dump("x = 1")
    before = file.replace(f"ipykernel_{os.getpid()}", "ipykernel_1")
    assert before != file
    assert sources.named_here(before) == file
    assert sources.named_here("/tmp/ipykernel_1/77.py") == "/tmp/ipykernel_1/77.py"


# -- off ---------------------------------------------------------------------------------------------------------------


class Cluster:
    """Ranks that are stopped until they are released; records whether the debugger is attached then."""

    def __init__(self) -> None:
        self.stopped = [stopped(0), stopped(1)]
        self.armed: list[Any] = []
        self.attached: list[bool] = []
        self.is_attached = bool

    def records(self) -> list[Stopped]:
        return self.stopped

    def ask(self, records: Any, command: Any) -> list[Any]:
        raise AssertionError("nobody is asked anything")

    def arm(self, lines: Any, raised: str | None, uncaught: str | None) -> None:
        self.armed.append(list(lines))

    def release(self) -> None:
        self.attached.append(self.is_attached())
        self.stopped = []

    def pause(self) -> str:
        return ""


def test_the_debugger_is_off_only_after_everything_has_resumed() -> None:
    cluster = Cluster()
    adapter = Adapter(cluster, lambda path: CELL)
    cluster.is_attached = lambda: adapter.attached  # type: ignore[assignment]
    adapter.answer("attach", {})
    adapter.answer("setBreakpoints", {"source": {"path": "cell"}, "breakpoints": [{"line": 10}]})
    assert [line.line for line in cluster.armed[-1]] == [10]
    adapter.answer("disconnect", {})
    assert cluster.attached == [True]
    assert not adapter.attached
    adapter.answer("disconnect", {})
    assert cluster.attached == [True], "later stops do not concern it"
    adapter.answer("setBreakpoints", {"source": {"path": "cell"}, "breakpoints": [{"line": 10}]})
    assert cluster.armed[-1] == [], "no breakpoint holds while the debugger is off"
