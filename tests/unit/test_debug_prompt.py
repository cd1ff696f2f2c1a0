"""The prompt of a call that waits: actors on threads of this process, a terminal that types the lines of a test."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch_nb.actor
from monarch_nb import debug
from monarch_nb.actor import Actor, ActorError, breakpoint_if, current_rank, endpoint, shutdown_context
from monarch_nb.config import configured
from monarch_nb.debug import StoppedAtBreakpoint
from monarch_nb.debug.prompt import NoPrompt, NothingToAsk, WaitPrompt
from monarch_nb.testing import in_process_host
from tests.unit.debug_tools import SECONDS, line_of

pytestmark = pytest.mark.timeout(30)
RANKS = 4
RELEASED = threading.Event()
Line = str | type[BaseException] | Callable[[], str]


class Trainer(Actor):
    def __init__(self) -> None:
        self.steps = 0

    @endpoint
    def step(self, x: float) -> int:
        rank = current_rank().rank
        loss = float("nan") if rank == 3 else 0.5 + rank / 100
        breakpoint()
        self.steps += 1
        total = loss * x
        return rank + 0 * int(total == total)

    @endpoint
    def only(self, ranks: list[int]) -> int:
        rank = current_rank().rank
        breakpoint_if(rank in ranks, "asked for")
        return rank

    @endpoint
    def quiet(self) -> str:
        return "quiet"

    @endpoint
    def hold(self) -> bool:
        return RELEASED.wait(SECONDS)

    @endpoint
    def forward(self, batch: list[int]) -> float:
        return self.loss([value * 2 for value in batch])

    def loss(self, values: list[int]) -> float:
        total = sum(values)
        return 1 / (total - 12)


STOP = line_of(__file__, "breakpoint()")


class Terminal:
    """Types the lines of a test, and records its output and its prompts."""

    can_ask = True
    echoes = True

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.outputs: list[str] = []
        self.prompts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.outputs)

    def write(self, text: str) -> None:
        self.outputs.append(text)

    def table(self, text: str, *, again: bool) -> bool:
        self.write(f"{text}\n")
        return True

    def beside(self) -> None:
        pass

    def question_withdrawn(self) -> None:
        self.write("gone\n")

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        self.prompts.append(prompt)
        assert self.lines, f"no line answers {prompt}"
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        if isinstance(line, type):
            raise line
        return line()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    try:
        procs = in_process_host().spawn_procs(per_host={"gpus": RANKS}, name="pretend")
        trainers = procs.spawn("trainers", Trainer)
        trainers.initialized.get(SECONDS)
        yield trainers
    finally:
        shutdown_context()


@pytest.fixture
def t(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    yield mesh
    debug.clear_breakpoint()
    while debug.sessions():
        debug.resume()
        debug.controller().stopped.wait(0.1, lambda: not debug.sessions())


@pytest.fixture
def terminal(t: Any) -> Iterator[Terminal]:
    fake = Terminal()
    thread = threading.current_thread()
    waits = WaitPrompt(debug.controller(), fake, lambda: threading.current_thread() is thread)
    waits.install()
    yield fake
    waits.uninstall()
    assert fake.lines == [], "a prompt asks for every line"


def stopped(t: Any, ranks: int = RANKS, x: float = 2) -> Any:
    """A call whose ranks have all stopped."""
    part = t if ranks == RANKS else t.slice(gpus=slice(0, ranks))
    future = part.step.call(x)
    debug.wait(ranks, timeout=SECONDS)
    return future


def test_differences_and_charts_over_the_ranks_and_one_tree_of_stacks(t: Any, terminal: Terminal) -> None:
    terminal.lines = ["diff loss", "watch loss", "display rank", "where", "n", "unwatch", "undisplay", "locals x", "c"]
    stopped(t).get(SECONDS)
    assert " ! nan" in terminal.text
    assert "× gpus=3" in terminal.text
    assert f"4  Trainer.step  test_debug_prompt.py:{STOP}  [trainers gpus=0-3]" in terminal.text
    assert terminal.text.count("loss  ▁") == 2, "watched values are shown at each stop"
    assert terminal.text.count("rank:") == 2
    assert "watched: nothing" in terminal.text
    assert "x = 2  (all 4)" in terminal.text


def test_statements_of_several_lines_and_interactive_python(t: Any, terminal: Terminal) -> None:
    terminal.lines = ["for i in range(2):", "    print('line', i)", "", "interact", "z = x + 40", "z", "exit", "c"]
    stopped(t, 1).get(SECONDS)
    assert terminal.prompts[1] == "... "
    assert "line 0\nline 1\n" in terminal.text
    assert terminal.prompts[4] == "mdb trainers[gpus=0] >>> "
    assert "42\n" in terminal.text


def test_pdbs_own_commands_are_there(t: Any, terminal: Terminal) -> None:
    jump, at_return = STOP + 2, STOP + 3
    terminal.lines = [f"j {jump}", f"b {at_return}", "cond 99 x", "c", "l", "", "cl", "help ll", "help", "c"]
    assert list(stopped(t, 1).get(SECONDS).values()) == [0]
    assert "→ total = loss * x" in terminal.text
    assert "*** Breakpoint number 99 out of range" in terminal.text
    assert f"goes on, and stopped again:\ntest_debug_prompt.py:{at_return}" in terminal.text
    assert terminal.text.count("[EOF]") <= 1
    assert "Deleted breakpoint 1" in terminal.text
    assert "For many ranks at once:" in terminal.text


def test_an_empty_line_means_the_step_before_again(t: Any, terminal: Terminal) -> None:
    terminal.lines = ["n", "", "p x", "", "c"]
    stopped(t, 1).get(SECONDS)
    assert terminal.text.count("  → ") >= 2
    assert "» n\n" in terminal.text, "the repeated command is shown"


def test_mistyped_input_is_explained_and_the_ranks_stay_stopped(t: Any, terminal: Terminal) -> None:
    terminal.lines = ["focus 9", "diff", "1 +", "nothing", "c"]
    stopped(t, 1).get(SECONDS)
    assert "*** no stopped rank is 9; stopped: trainers" in terminal.text
    assert "*** diff needs an expression" in terminal.text
    assert "*** SyntaxError" in terminal.text
    assert "*** NameError" in terminal.text


def test_quit_asks_first_and_then_fails_the_call(t: Any, terminal: Terminal) -> None:
    terminal.lines = ["q", "n", "q", "y"]
    with pytest.raises(ActorError, match="quit in the debugger, where it was stopped"):
        stopped(t, 1).get(SECONDS)
    assert "end the endpoints of trainers gpus=0, so that their calls fail? [y/N] " in terminal.prompts


@pytest.mark.parametrize("line", ["detach", EOFError])
def test_ranks_stay_stopped_and_the_call_can_be_awaited_again(t: Any, terminal: Terminal, line: Line) -> None:
    terminal.lines = [line]
    future = stopped(t, 1)
    with pytest.raises(StoppedAtBreakpoint, match="left stopped in the debugger; the call stays under way"):
        future.get(SECONDS)
    assert t.slice(gpus=1).quiet.call_one().get(SECONDS) == "quiet", "a rank that stays stopped delays no other"
    terminal.lines = ["n", "c"]
    assert t.slice(gpus=0).quiet.call_one().get(SECONDS) == "quiet", "a call to the stopped rank asks"
    assert list(future.get(SECONDS).values()) == [0]


@pytest.mark.parametrize(("answer", "stays"), [("l", True), ("c", False), (KeyboardInterrupt, True)])
def test_an_interrupt_asks_whether_to_leave_or_to_go_on(t: Any, terminal: Terminal, answer: Line, stays: bool) -> None:
    terminal.lines = [KeyboardInterrupt, "", "p x", KeyboardInterrupt, answer]
    future = stopped(t, 1)
    if stays:
        with pytest.raises(StoppedAtBreakpoint):
            future.get(SECONDS)
        assert len(debug.sessions()) == 1
    else:
        assert list(future.get(SECONDS).values()) == [0]
    assert "leave them stopped (l), continue them (c), or return to the prompt (Enter)? " in terminal.prompts


def test_a_question_that_nobody_needs_answered_any_more_is_given_up(t: Any, terminal: Terminal) -> None:
    def resume() -> str:
        debug.resume()
        raise NothingToAsk

    terminal.lines = [resume]
    assert list(stopped(t, 1).get(SECONDS).values()) == [0]
    assert terminal.text.endswith("gone\n")


def test_stops_during_an_open_question_are_announced_before_the_next(t: Any, terminal: Terminal) -> None:
    def stop_another() -> str:
        t.slice(gpus=2).step.broadcast(1)
        debug.wait(2, timeout=SECONDS)
        return "p x"

    terminal.table = lambda text, *, again: not again and terminal.write(text) is None  # type: ignore[method-assign]
    terminal.lines = ["p x", stop_another, "p rank", "focus gpus=2", "focus all", "c"]
    stopped(t, 1).get(SECONDS)
    assert terminal.text.count("other ranks have stopped: trainers gpus=2 at test_debug_prompt.py") == 1
    groups = ["gpus=0", "gpus=0", "gpus=0,2", "gpus=0,2", "gpus=2", "gpus=0,2"]
    assert terminal.prompts == [f"mdb trainers[{ranks}]> " for ranks in groups], "at one line they are one group"


def test_a_stop_that_the_call_does_not_need_is_asked_about(t: Any, terminal: Terminal) -> None:
    def release() -> str:
        RELEASED.set()
        return "c"

    t.slice(gpus=0).step.broadcast(1)
    debug.wait(1, timeout=SECONDS)
    terminal.lines = ["n", release]
    assert t.slice(gpus=1).hold.call_one().get(SECONDS)
    assert "■ 1 rank stopped" in terminal.text
    assert not debug.sessions()


def test_without_anybody_to_ask_the_call_raises_and_stays_valid(t: Any, terminal: Terminal) -> None:
    terminal.can_ask = False
    future = stopped(t)
    with pytest.raises(StoppedAtBreakpoint, match=r"4 of 4  at test_debug_prompt\.py") as caught:
        future.get(SECONDS)
    assert [record.rank for record in caught.value.sessions] == [0, 1, 2, 3]
    assert "%%mdb trainers" in str(caught.value)
    debug.resume()
    assert list(future.get(SECONDS).values()) == [0, 1, 2, 3]


def test_a_terminal_that_cannot_ask_after_all_raises_likewise(t: Any, terminal: Terminal) -> None:
    terminal.lines = [NoPrompt]
    with pytest.raises(StoppedAtBreakpoint, match="no prompt can be shown here"):
        stopped(t, 1).get(SECONDS)


def test_a_question_waits_for_ranks_that_may_still_stop(t: Any, terminal: Terminal) -> None:
    terminal.can_ask = False
    t.slice(gpus=0).step.broadcast(1)
    debug.wait(1, timeout=SECONDS)
    with configured(debug_patience="200ms"), pytest.raises(StoppedAtBreakpoint, match="trainers gpus=0 stopped"):
        t.quiet.call().get(SECONDS)


def test_the_frames_of_a_failure_are_looked_into_and_closed(t: Any, terminal: Terminal) -> None:
    with pytest.raises(ActorError) as caught:
        t.slice(gpus=2).forward.call_one([1, 2, 3]).get(SECONDS)
    group = debug.post_mortem(caught.value)
    assert group.run("p total").text == "12"
    assert "in forward" in group.run("u").text
    assert group.eval("batch").values == {2: "[1, 2, 3]"}
    assert [record.event for record in group.sessions] == ["failure"]
    group.resume()
    assert group.sessions == []
