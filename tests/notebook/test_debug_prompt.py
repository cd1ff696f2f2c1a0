"""The debugger in a cell, over stdin as a front end does it: a call waits, ranks stop, somebody types."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.debug_tools import LET_GO, Debugged, Talk, stopping
from tests.notebook.view_client import ViewClient
from tests.processes import freeze

pytestmark = pytest.mark.timeout(120)
RANKS = 8
ALL_STOPPED = "f = t.step.call(2); monarch.debug.wait(8); f.get()"  # however long that takes: one question about all


@pytest.fixture(scope="module")
def kernel() -> Iterator[Debugged]:
    with stopping(RANKS) as notebook:
        yield notebook


@pytest.fixture
def nb(kernel: Debugged) -> Iterator[Debugged]:
    yield kernel
    result = kernel.run(LET_GO)
    assert result.ok().text == "0", result


def test_eight_stopped_ranks_are_listed_focused_stepped_and_resumed(nb: Debugged) -> None:
    talk = nb.talk(ALL_STOPPED, "p loss", "n", "focus 3", "p loss", "@gpus=0:2 p rank * 2", "focus all", "p x", "c")
    assert talk.cell.error is None
    assert "0  gpus=0\n2  gpus=1" in talk.text
    assert "8 of 8  at Cell In[3]:17 in Trainer.step  trainers gpus=0-7  breakpoint()" in talk.before[0]
    assert "→ 17          breakpoint()" in talk.before[0]
    assert talk.prompts[0] == "mdb trainers[gpus=0-7]> "
    assert talk.prompts[3] == "mdb trainers[gpus=3]> "
    assert re.search(r"^nan +gpus=3$", talk.text, re.MULTILINE)
    assert "gpus=0-7  Cell In[3]:18 in Trainer.step  → self.steps += 1" in talk.text
    assert "» p loss" not in talk.text, "the front end shows what was typed"
    assert "2  (all 8)" in talk.text
    assert talk.text.rstrip().endswith("trainers gpus=0-7 go on")
    assert "gpus=7: 7" in talk.cell.text


def test_the_view_below_a_prompt_keeps_its_last_stops(nb: Debugged) -> None:
    talk = nb.talk(ALL_STOPPED, "n", "c")
    last = [update["text/html"] for update in talk.cell.updates if update.get("text/html")][-1]
    assert "nothing is stopped any more" in last
    assert re.search(r"last shown at \d\d:\d\d:\d\d", last)
    assert "in Trainer.step" in last
    assert "→ 18" in last


def test_the_call_goes_on_to_the_next_breakpoint_and_asks_again(nb: Debugged) -> None:
    nb.run("%break Trainer.loss on trainers gpus=0:2").ok()
    # The others are idle once they have answered a later call.
    idle = "others = t.slice(gpus=slice(2, 8)).pid.call()\nwhile not others.done(): time.sleep(0.01)\n"
    talk = nb.talk(f"f = t.forward.call([1, 2, 4]); monarch.debug.wait(2)\n{idle}f.get()", "p values", "c")
    assert "2 of 8  at Cell In[3]:34 in Trainer.loss  trainers gpus=0-1" in talk.before[0]
    assert "not stopped: trainers gpus=2-7: idle" in talk.before[0]
    assert "[2, 4, 8]  (all 2)" in talk.text
    assert nb.run("%break").text == "[breakpoint 1 at Trainer.loss on trainers]"
    nb.run("%break clear").ok()
    assert "no breakpoints are set" in nb.run("%break").ok().stdout
    assert "all 8 ranks: 0.5" in nb.run("t.forward.call([1, 2, 4]).get()").ok().text


def test_the_table_of_an_open_question_includes_later_stops(nb: Debugged, tmp_path: Path) -> None:
    request = nb.start(f"t.slice(gpus=slice(2)).late.call({str(tmp_path)!r}).get()", asks=True)
    assert nb.next_prompt() == "mdb trainers[gpus=0]> "
    (tmp_path / "asked").touch()
    talk = Talk()
    nb.read_until(request, talk, lambda: "2 of 8  at Cell In[3]:46 in Trainer.late  trainers gpus=0-1" in talk.text)
    assert "1 rank stopped" not in talk.text, "in place of the table before"
    nb.answer("focus all")
    nb.go_on(request, talk, "c")
    assert "meanwhile" not in talk.text, "the table has told it"
    assert talk.cell.error is None


def test_inspecting_a_stop_does_not_prompt_while_another_rank_is_silent(nb: Debugged) -> None:
    pid = int(nb.run("f = t.slice(gpus=0).step.call_one(2)\nt.slice(gpus=1).pid.call_one().get()").ok().text)
    nb.run("monarch.debug.wait(1);").ok()
    freeze(pid)
    try:
        talk = nb.talk("%mdb")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "gpus=1: does not answer" in talk.cell.text
    assert talk.text == "", "it is shown once"
    assert talk.cell.error is None


def test_under_await_it_is_the_same(nb: Debugged) -> None:
    talk = nb.talk("f = t.only.call([1, 2]); monarch.debug.wait(2); await f", "p rank", "n", "c")
    assert talk.cell.error is None
    assert "1  gpus=1\n2  gpus=2" in talk.text
    assert "gpus=7: 7" in talk.cell.text


def test_under_on_a_breakpoint_in_the_cell_itself_stops_there(nb: Debugged, tmp_path: Path) -> None:
    # Both are at the breakpoint at about the same time: the first question is about both.
    meet = f"import os, time\nopen({str(tmp_path)!r} + f'/{{rank}}', 'w').close()\n"
    meet += f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.001)\n"
    talk = nb.talk(f"%%on w gpus=0:2\n{meet}here = rank * 10\nbreakpoint()\nhere", "p here", "c")
    assert talk.prompts[0] == "mdb w[gpus=0-1]> "
    assert "0   gpus=0\n10  gpus=1" in talk.text
    assert "10" in talk.cell.text


def test_an_interrupt_at_the_prompt_asks_to_leave_or_go_on(nb: Debugged) -> None:
    talk = nb.talk("f = t.slice(gpus=0).step.call_one(2); f.get()", None, "", "p x", None, "l")
    assert "leave them stopped (l), continue them (c)" in talk.prompts[1]
    assert talk.cell.error is not None
    assert talk.cell.error["ename"] == "StoppedAtBreakpoint"
    talk = nb.talk("f.get()", None, "c")
    assert talk.cell.text == "0"


def test_frames_of_an_error_open_at_a_prompt_by_ipythons_debug(nb: Debugged) -> None:
    for magic in ("%mpm", "%debug"):
        assert nb.run("t.slice(gpus=2).forward.call_one([1, 2, 3]).get()").error is not None
        talk = nb.talk(magic, "p total", "u", "p scaled", "q")
        assert "trainers gpus=2  post-mortem: ZeroDivisionError: division by zero" in talk.before[0]
        assert "12\n" in talk.text
        assert "> Cell In[3]:31 in forward" in talk.text
        assert "[2, 4, 6]" in talk.text
        assert talk.cell.error is None


def test_a_question_that_nobody_needs_answered_any_more_is_given_up(nb: Debugged, tmp_path: Path) -> None:
    flag = tmp_path / "asked"
    elsewhere = f"while not os.path.exists({str(flag)!r}): time.sleep(0.01)\nmonarch.debug.resume()"
    nb.run(f"elsewhere = threading.Thread(target=exec, args=({elsewhere!r}, globals()))").ok()
    request = nb.start("elsewhere.start(); t.slice(gpus=0).step.call_one(2).get()", asks=True)
    assert nb.next_prompt() == "mdb trainers[gpus=0]> "
    flag.touch()
    talk = nb.go_on(request, Talk())
    assert "any more" not in talk.text, "the view answers the question that is left"
    assert talk.cell.text == "0"
    assert nb.talk("t.slice(gpus=0).step.call_one(2).get()", "p rank", "c").cell.text == "0", "questions work as before"


def test_a_rank_killed_externally_during_the_prompt_ends_the_cell(nb: Debugged) -> None:
    nb.run("killed = w.spawn('killed', Trainer)").ok()
    pid = int(nb.run("killed.slice(gpus=6).pid.call_one().get()").ok().text)
    request = nb.start("killed.slice(gpus=6).step.call_one(2).get()", asks=True)
    assert nb.next_prompt() == "mdb killed[gpus=6]> "
    os.kill(pid, signal.SIGKILL)
    talk = nb.go_on(request, Talk())
    assert f"pid {pid}" in talk.cell.traceback
    assert nb.question() is None
    nb.run("%heal w").ok()


def test_front_ends_without_subshells_see_stops_and_steps_of_the_prompt(nb: Debugged) -> None:
    view = ViewClient(nb, subshell=False)
    view.send(type="watch", topic="debug", id="D")
    view.until(lambda view: bool(view.of("debug")))
    request = nb.start(ALL_STOPPED, asks=True)
    nb.next_prompt()
    view.until(lambda view: view.of("debug")[-1]["stopped"] == RANKS)
    (group,) = view.of("debug")[-1]["groups"]
    assert (group["where"], group["file"], group["line"]) == ("gpus=0-7", "Cell In[3]", 17)
    nb.client.input("n")
    nb.next_prompt()
    view.until(lambda view: [row["line"] for row in view.of("debug")[-1]["groups"]] == [18])
    nb.client.input("c")
    assert nb.go_on(request, Talk()).cell.error is None
    view.until(lambda view: view.of("debug")[-1]["groups"] == [])
    view.close()


def test_a_wait_after_its_cell_asks_nobody_and_the_next_debugs(nb: Debugged) -> None:
    nb.run(
        "found = []\nf = t.slice(gpus=0).step.call_one(2)\n"
        "waiting = threading.Thread(target=lambda: found.append(f.get()))\nwaiting.start()"
    ).ok()
    assert "trainers gpus=0" in nb.run("monarch.debug.wait(1)\n%mdb").ok().text
    assert "0.5" in nb.run("%%mdb trainers\np loss\nc").ok().text
    assert nb.run("waiting.join(20); found").ok().text == "[0]"
    assert nb.question() is None


def test_pdb_in_the_notebook_itself_stays_what_it_was(nb: Debugged) -> None:
    talk = nb.talk("import pdb\nhere = 5\npdb.set_trace()\nhere += 1", "p here", "c")
    assert talk.prompts == ["ipdb> ", "ipdb> "]
    assert "5\n" in talk.text
    assert nb.run("monarch.debug.sessions()").text == "[]"


def test_with_debug_prompt_off_no_cell_asks_but_commands_work(nb: Debugged) -> None:
    nb.run("from monarch.config import configure\nconfigure(debug_prompt=False)").ok()
    try:
        stopped = nb.finish(nb.start("g = t.only.call([2])\ng.get()", asks=True))
        assert stopped.error is not None
        assert stopped.error["ename"] == "StoppedAtBreakpoint"
        assert "» p rank\n2" in nb.finish(nb.start("%%mdb t gpus=2\np rank\nc", asks=True)).ok().text
        assert nb.finish(nb.start("sum(g.get().values())", asks=True)).ok().text == "28"
        assert "ZeroDivisionError" in nb.finish(nb.start("t.forward.call([1, 5]).get()", asks=True)).traceback
        opened = nb.finish(nb.start("%mpm", asks=True)).ok()
        assert "post-mortem" in opened.text + opened.stdout + str(opened.displays), "listed, and nothing is asked"
        assert not nb.client.stdin_channel.msg_ready()
    finally:
        nb.run("configure(debug_prompt=True)").ok()
        nb.run("%%mdb trainers\nq")
