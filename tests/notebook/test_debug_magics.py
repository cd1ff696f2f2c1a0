"""The debugger where nobody can type: calls raise, cells give commands; as in nbclient, papermill, and scripts."""

from collections.abc import Iterator

import pytest

from tests.notebook.debug_tools import LET_GO, STOPPING
from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    notebook = Notebook()
    try:
        notebook.run(STOPPING).ok()
        notebook.run("%mesh w gpus=4\nt = w.spawn('trainers', Trainer)\nt.pid.call().get()").ok()
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def nb(kernel: Notebook) -> Iterator[Notebook]:
    yield kernel
    result = kernel.run(LET_GO)
    assert result.ok().text == "0", result


@pytest.mark.slow
def test_a_call_whose_ranks_are_all_stopped_raises_and_stays_valid(nb: Notebook) -> None:
    for wait in ("f.get()", "await f"):
        nb.run("f = t.step.call(2)").ok()
        cell = nb.run(wait)
        assert cell.error is not None
        assert cell.error["ename"] == "StoppedAtBreakpoint"
        assert "4 of 4  at Cell In[3]:17 in Trainer.step  trainers gpus=0-3" in cell.traceback
        assert "%%mdb trainers" in cell.traceback
        assert "monarch_nb" not in cell.traceback, "the engine's own frames are nobody's business"
        assert nb.run("f.done()").text == "False"
        assert nb.run("%%mdb\nc all").ok().text.endswith("trainers gpus=0-3 go on")
        assert "gpus=3: 3" in nb.run(wait).ok().text


def test_ranks_waiting_for_stopped_ranks_do_not_hang_the_cell(nb: Notebook) -> None:
    nb.run("monarch.configure(debug_patience='300ms')").ok()
    cell = nb.run(
        "f = t.only.call([1]); t.slice(gpus=0).step.broadcast(1); f2 = t.only.call([])\nmonarch.debug.wait(2); f2.get()"
    )
    assert cell.error is not None
    assert "trainers gpus=0" in cell.traceback
    nb.run("monarch.debug.wait(2); monarch.debug.resume()").ok()
    assert nb.run("list(f.get().values())").text == "[0, 1, 2, 3]"


def test_lines_of_a_cell_are_commands_and_their_results_are_data(nb: Notebook) -> None:
    nb.run("f = t.step.call(2); monarch.debug.wait(4)").ok()
    cell = nb.run("%%mdb trainers\np loss\nn\nfor i in range(2):\n    print(i)\ndiff loss\n# a comment")
    assert "0.5   gpus=0" in cell.text
    assert "nan   gpus=3" in cell.text
    assert "gpus=0-3  Cell In[3]:18" in cell.text
    assert nb.run("_[0].values[1], len(_), _.values[0]").text == "(0.51, 4, 0.5)"
    single = nb.run("%%mdb trainers gpus=3\np rank\nn")
    assert single.text.splitlines()[:2] == ["» p rank", "3"]
    assert nb.run("[one.frame.line for one in monarch.debug.sessions()]").text == "[18, 18, 18, 19]"


def test_the_list_shows_groups_and_the_mesh_shows_paused_ranks(nb: Notebook) -> None:
    assert nb.run("%mdb").ok().text == "nothing is stopped"
    nb.run("f = t.only.call([0, 2]); others = t.slice(gpus=1).pid.call_one(), t.slice(gpus=3).pid.call_one()").ok()
    # The others are idle once they have answered a later call.
    nb.run("monarch.debug.wait(2)\nwhile not all(one.done() for one in others): time.sleep(0.01)").ok()
    text = nb.run("%mdb").ok().text
    assert "2 of 4  at Cell In[3]:25 in Trainer.only  trainers gpus=0,2  asked for" in text
    assert "not stopped: trainers gpus=1,3: idle" in text
    assert "2 paused" in nb.run("t").html
    assert "2 paused, 2 idle" in nb.run("%meshes").text


def test_post_mortem_without_a_prompt(nb: Notebook) -> None:
    assert nb.run("t.slice(gpus=1).forward.call_one([1, 2, 3]).get()").error is not None
    assert "post-mortem: ZeroDivisionError: division by zero" in nb.run("%mpm").ok().text
    assert nb.run("%%mdb trainers gpus=1\np total\nu\np scaled\nc").ok().text.splitlines()[1] == "12"
    assert "post-mortem" in nb.run("%mpm trainers gpus=1").ok().text
    assert "it has not failed" in nb.run("%mpm trainers gpus=0").stderr


def test_a_rank_frozen_at_an_error_stops_there(nb: Notebook) -> None:
    nb.run("%freeze trainers").ok()
    cell = nb.run("f = t.slice(gpus=2).forward.call_one([1, 2, 3]); f.get()")
    assert cell.error is not None
    assert cell.error["ename"] == "StoppedAtBreakpoint"
    assert "ZeroDivisionError: division by zero" in cell.traceback
    nb.run("%freeze trainers --off\n").ok()
    nb.run("monarch.debug.resume()").ok()
    assert nb.run("f.get()").error is not None


def test_stacks_show_where_every_rank_is(nb: Notebook) -> None:
    nb.run("f = t.slice(gpus=0).step.call_one(1); monarch.debug.wait(1)").ok()
    text = nb.run("%stacks trainers").ok().text
    assert "Trainer.step" in text
    assert "3  idle  [gpus=1-3]" in text


@pytest.mark.parametrize(
    ("line", "explanation"),
    [
        ("%mdb trainers", "%mdb takes no arguments"),
        ("%%mdb trainers\np x", "none of these ranks is stopped"),
        ("%%mdb nobody\np x", "there is no mesh 'nobody'"),
        ("%break", ""),
        ("%break somewhere", "write %break train.py:42"),
        ("%break nowhere.py:3 on trainers", "no code in this process comes from a file nowhere.py"),
        ("%break Trainer.loss if total > on trainers", "is not an expression"),
        ("%break clear 99", "there is no breakpoint 99"),
        ("%break clear x", "write the number of a breakpoint"),
        ("%stacks", "which mesh?"),
        ("%mpm trainers", "has 4 ranks: say which"),
    ],
)
def test_mistyped_commands_are_explained(nb: Notebook, line: str, explanation: str) -> None:
    cell = nb.run(line)
    assert explanation in cell.stderr + cell.traceback
    assert nb.run("1 + 1").ok().text == "2"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%mdb ", {"trainers"}),
        ("%%mdb trainers ", {"gpus="}),
        ("%break ", {"clear", "Trainer.loss", "Trainer.step"}),
        ("%break Trainer.loss ", {"on", "if"}),
        ("%break Trainer.loss on ", {"trainers"}),
        ("%break Trainer.loss on trainers ", {"gpus="}),
        ("%break Trainer.loss on trainers gpus=", {"0", "3", "0-3"}),
        ("%stacks ", {"trainers", "w"}),
        ("%mpm trainers ", {"gpus="}),
    ],
)
def test_commands_and_their_arguments_are_completed(nb: Notebook, line: str, offered: set[str]) -> None:
    matches = set(nb.complete(line))
    assert offered <= matches
    assert "print" not in matches
