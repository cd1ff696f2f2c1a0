"""%reload in a real kernel: a local module is edited while actors of it live."""

from pathlib import Path

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

MODEL = """
from monarch.actor import Actor, endpoint

def factor():
    return {factor}

class Counter(Actor):
    def __init__(self):
        self.n = 0

    @endpoint
    def add(self, k):
        self.n += factor() * k
        return self.n
"""


@pytest.fixture
def module(nb: Notebook, tmp_path: Path) -> Path:
    path = tmp_path / "edited_model.py"
    path.write_text(MODEL.format(factor=1))
    nb.run(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.modules.pop('edited_model', None)\n"
        "%mesh r gpus=2 --fresh\nfrom edited_model import Counter, factor\ncounters = r.spawn('counters', Counter)\n"
        "counters.add.call(1).get()"
    ).ok()
    return path


def test_an_edited_module_reaches_actors_and_the_notebook(nb: Notebook, module: Path) -> None:
    module.write_text(MODEL.format(factor=10))
    text = nb.run("%reload counters").ok().stdout
    assert text == "reloaded edited_model; actors with the new class: counters\n"
    assert nb.run("counters.add.call(1).get().values(), factor()").text == "([11, 11], 10)"
    assert nb.run("%reload counters").ok().stdout == "nothing has changed\n"
    nb.run("%stop r").ok()


def test_a_module_can_be_named(nb: Notebook, module: Path) -> None:
    assert "reloaded edited_model" in nb.run("%reload edited_model").ok().stdout
    assert "edited_model" in nb.complete("%reload edited_m")
    nb.run("%stop r").ok()


def test_a_typo_in_the_file_is_shown_and_changes_nothing(nb: Notebook, module: Path) -> None:
    module.write_text(MODEL.format(factor=10) + "\n    1 +\n")
    cell = nb.run("%reload")
    assert cell.error is not None
    assert cell.error["ename"] in ("SyntaxError", "IndentationError")
    assert "edited_model.py" in cell.traceback
    assert nb.run("counters.add.call(1).get().values()").text == "[2, 2]"
    nb.run("%stop r").ok()


def test_a_class_cell_run_again_reaches_its_actors(nb: Notebook) -> None:
    source = "class Teller(Actor):\n    @endpoint\n    def tell(self):\n        return {!r}\n"
    nb.run("from monarch.actor import Actor, endpoint\n" + source.format("old")).ok()
    nb.run("tellers = w.spawn('tellers', Teller); tellers.tell.call().get()").ok()
    nb.run(source.format("new")).ok()
    assert nb.run("%reload tellers").ok().stdout == "actors with the new class: tellers\n"
    assert nb.run("tellers.tell.call().get().get(3)").text == "'new'"
    nb.run("tellers.stop().get()").ok()


def test_another_class_imported_over_the_name_is_no_new_definition(nb: Notebook, module: Path) -> None:
    source = "class Counter(Actor):\n    @endpoint\n    def tell(self):\n        return 'mine'\n"
    nb.run("from monarch.actor import Actor, endpoint\n" + source).ok()
    nb.run("tellers = w.spawn('tellers', Counter); tellers.tell.call().get()").ok()
    nb.run("from edited_model import Counter").ok()
    nb.run("%reload tellers").ok()
    assert nb.run("tellers.tell.call().get().get(3)").text == "'mine'"
    nb.run("tellers.stop().get()\n%stop r").ok()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("w", "w is a mesh of processes"),
        ("json", "json is an installed package"),
        ("nothing", "there is no mesh 'nothing'"),
    ],
)
def test_classes_that_cannot_be_reloaded_are_named(nb: Notebook, name: str, error: str) -> None:
    nb.run("import json").ok()
    assert error in nb.run(f"%reload {name}").stderr
