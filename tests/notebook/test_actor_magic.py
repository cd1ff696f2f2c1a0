"""%%actor in a real kernel: classes from cells, spawned and taken over."""

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

IMPORTS = "from monarch.actor import Actor, endpoint, reload_mesh"
COUNTER = """%%actor {line}
from monarch.actor import Actor, endpoint

def scaled(x):
    return {factor} * x

class Counter(Actor):
    def __init__(self, start=0, name='none'):
        self.n, self.name = start, name

    @endpoint
    def add(self, k=1):
        self.n += scaled(k)
        return self.n

    @endpoint
    def told(self):
        return self.name
"""


def counter(line: str = "counters on w", factor: int = 1) -> str:
    return COUNTER.format(line=line, factor=factor)


@pytest.fixture
def actors(nb: Notebook) -> Notebook:
    """No actors of earlier tests."""
    nb.run("if 'counters' in globals():\n    counters.stop().get()\n    del counters").ok()
    return nb


def test_the_class_of_the_cell_is_spawned_and_bound(actors: Notebook) -> None:
    cell = actors.run(counter()).ok()
    assert cell.text == "<Counter mesh 'counters' {gpus=4}>"
    assert 'class="mnb-idle"' in cell.html
    assert actors.run("counters.add.call(2).get().values(), Counter.__name__").text == "([2, 2, 2, 2], 'Counter')"


def test_arguments_are_expressions_of_the_notebook(actors: Notebook) -> None:
    actors.run("base = 10").ok()
    actors.run(counter("counters on w base+1, name='two words'")).ok()
    assert actors.run("counters.add.call(1).get().get(0)").text == "12"
    assert actors.run("counters.told.call().get().get(3)").text == "'two words'"


def test_the_cell_again_reloads_in_place_and_keeps_state(actors: Notebook) -> None:
    actors.run(counter()).ok()
    before = actors.run("kept = counters; counters.add.call(5).get().values()").text
    assert before == "[5, 5, 5, 5]"
    cell = actors.run(counter(factor=10)).ok()
    assert cell.stdout == "counters: 4 actors now run the new Counter and have kept their state\n"
    assert actors.run("kept.add.call(1).get().values()").text == "[15, 15, 15, 15]"


def test_a_hook_moves_state_to_the_new_class(actors: Notebook) -> None:
    actors.run(counter()).ok()
    more = "\n    @endpoint\n    def seen(self):\n        return self.was\n"
    more += "    def __reload__(self, old):\n        self.was = old.__name__"
    actors.run(counter() + more).ok()
    assert actors.run("counters.seen.call().get().values()").text == "['Counter', 'Counter', 'Counter', 'Counter']"


def test_a_changed_init_and_changed_arguments_are_said(actors: Notebook) -> None:
    actors.run(counter("counters on w start=1")).ok()
    changed = counter("counters on w start=2").replace("self.n, self.name", "self.other = self.n, self.name")
    notice = actors.run(changed).ok().stdout
    assert "the arguments have changed, but __init__ does not run again: --fresh spawns new actors" in notice
    assert "Counter.__init__ has changed" in notice
    assert actors.run("counters.add.call(1).get().get(0)").text == "2"


def test_the_fresh_option_spawns_anew(actors: Notebook) -> None:
    actors.run(counter()).ok()
    actors.run("counters.add.call(5).get()").ok()
    assert actors.run(counter("counters on w start=100 --fresh")).ok().stdout == ""
    assert actors.run("counters.add.call(1).get().get(0)").text == "101"


def test_from_sync_to_async_asks_for_fresh(actors: Notebook) -> None:
    actors.run(counter()).ok()
    changed = counter().replace("    def add", "    async def add").replace("    def told", "    async def told")
    error = actors.run(changed).stderr
    assert error.strip() == "UsageError: %%actor: Counter is async now and was sync; --fresh spawns new actors"
    actors.run(changed.replace("on w", "on w --fresh")).ok()
    assert actors.run("counters.add.call(1).get().get(0)").text == "1"


def test_the_mesh_may_be_a_slice(actors: Notebook) -> None:
    assert (
        actors.run(counter("counters on w.slice(gpus=slice(0, 2))")).ok().text == "<Counter mesh 'counters' {gpus=2}>"
    )
    cell = actors.run(counter("counters on w")).ok()
    assert "counters is replaced: it ran on w gpus=2 and now runs on w gpus=4" in cell.stdout
    assert cell.text == "<Counter mesh 'counters' {gpus=4}>"


def test_one_of_several_classes_is_named_and_bases_are_helpers(actors: Notebook) -> None:
    source = f"{IMPORTS}\nclass Base(Actor):\n    @endpoint\n    def who(self):\n        return type(self).__name__\n"
    actors.run(f"%%actor counters on w\n{source}class One(Base):\n    pass\n").ok()
    assert actors.run("counters.who.call().get().get(0)").text == "'One'"
    several = f"{source}class One(Base):\n    pass\nclass Two(Base):\n    pass\n"
    error = actors.run(f"%%actor counters on w\n{several}").stderr
    assert "several Actor classes, One, Two: name one, as in %%actor counters on w class=One" in error
    actors.run(f"%%actor counters on w class=Two\n{several}").ok()
    assert actors.run("counters.who.call().get().get(0)").text == "'Two'"


def test_a_raising_init_ends_the_cell_and_the_mended_one_respawns(actors: Notebook) -> None:
    broken = counter().replace("self.n, self.name = start, name", "self.n = start / 0")
    cell = actors.run(broken)
    assert cell.error is not None
    assert cell.error["ename"] == "SupervisionError"
    assert "ZeroDivisionError" in cell.traceback
    assert "self.n = start / 0" in cell.traceback
    cell = actors.run(counter()).ok()
    assert "counters is replaced: all its ranks had failed" in cell.stdout
    assert actors.run("counters.add.call(1).get().get(0)").text == "1"


def test_a_lost_rank_is_healed_with_the_newest_cells_class(actors: Notebook) -> None:
    actors.run(counter()).ok()
    actors.run(counter(factor=10)).ok()
    actors.run("import os, signal\nos.kill(w.run(os.getpid).get().get(2), signal.SIGKILL)").ok()
    assert actors.run("counters.add.call(1).get()").error is not None
    error = actors.run(counter(factor=10)).stderr
    assert "1 of 4 ranks of counters have failed: %heal counters first, or add --fresh" in error
    actors.run("%heal counters").ok()
    assert actors.run("counters.add.call(1).get().get(2)").text == "10"


def test_errors_in_endpoints_show_the_line_of_the_cell(actors: Notebook) -> None:
    actors.run(counter()).ok()
    cell = actors.run("counters.add.call('x').get()")
    assert "self.n += scaled(k)" in cell.traceback
    assert "line 13" in cell.traceback


def test_a_syntax_error_is_told_at_its_line_and_changes_nothing(actors: Notebook) -> None:
    actors.run(counter()).ok()
    cell = actors.run(counter() + "\n    1 +\n")
    assert cell.error is not None
    assert cell.error["ename"] == "SyntaxError"
    assert len(cell.traceback.splitlines()) < 8
    assert actors.run("counters.add.call(1).get().get(0)").text == "1"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "a name, and the mesh"),
        ("counters on nothing", "there is no mesh 'nothing'"),
        ("counters on a", "a is an ActorMesh; actors live on a mesh of processes"),
        ("os on w", "os is a module already"),
        ("counters on w class=os", "class=os is a module, no Actor class; the cell defines Counter"),
        ("counters on w start=missing", "start=missing gives NameError: name 'missing' is not defined"),
        ("counters on w speed=1", "unexpected keyword argument 'speed'"),
    ],
)
def test_mistakes_in_the_line_are_reported_in_one_line(actors: Notebook, line: str, error: str) -> None:
    cell = actors.run(counter(line))
    assert error in cell.stderr
    assert cell.stderr.startswith("UsageError: ")
    assert cell.stderr.count("\n") <= 2


def test_a_cell_without_an_actor_class_is_told(actors: Notebook) -> None:
    assert "the cell defines no Actor class" in actors.run("%%actor counters on w\nx = 1").stderr


def test_names_and_options_are_completed(actors: Notebook) -> None:
    actors.run(counter()).ok()
    assert "counters" in actors.complete("%%actor cou")
    assert "on" in actors.complete("%%actor counters o")
    assert "w" in actors.complete("%%actor counters on ")
    assert "counters" not in actors.complete("%%actor counters on ")
    assert {"class=", "--fresh"} <= set(actors.complete("%%actor counters on w "))
