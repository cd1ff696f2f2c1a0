"""Cells that are run again: what remains of the run before is reported, once."""

import re

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

CLASS = """
class Stepper(Actor):
    @endpoint
    def step(self):
        return {gives}
"""


def test_actors_of_an_older_class_say_so_once(nb: Notebook) -> None:
    first = nb.run(CLASS.format(gives=1) + "steppers = w.spawn('steppers', Stepper)\nsteppers.step.call().get()")
    assert "runs Stepper" not in first.ok().stdout
    again = nb.run(CLASS.format(gives=1))
    assert "runs Stepper" not in nb.run("steppers.step.call().get()").ok().stdout, "the cell was run as it was"
    nb.run(CLASS.format(gives=2)).ok()
    result = nb.run("steppers.step.call().get()").ok()
    notices = re.findall(
        r"steppers runs Stepper as of In\[(\d+)\]; %reload steppers brings the one of In\[(\d+)\]", result.stdout
    )
    assert len(notices) == 1
    assert int(notices[0][0]) < int(notices[0][1])
    assert "all 4 ranks: 1" in result.text
    assert "runs Stepper" not in nb.run("steppers.step.call().get()").ok().stdout, "once"
    nb.run("%reload steppers").ok()
    cell = nb.run("steppers.step.call().get()").ok()
    assert "runs Stepper" not in cell.stdout
    assert "all 4 ranks: 2" in cell.text
    assert again.error is None
    nb.run("%stop steppers").ok()


def test_a_class_changed_in_the_cell_that_calls_is_told_there(nb: Notebook) -> None:
    nb.run(CLASS.format(gives=1) + "one = w.spawn('one', Stepper)").ok()
    assert "one runs Stepper as of" in nb.run(CLASS.format(gives=3) + "one.step.broadcast()").ok().stdout
    nb.run("%stop one").ok()


def test_spawning_a_name_again_mentions_the_unreferenced_mesh(nb: Notebook) -> None:
    spawn = "twice = w.spawn('twice', Stepper)"
    assert nb.run(CLASS.format(gives=1) + spawn).ok().stdout == ""
    notice = nb.run(spawn).ok().stdout
    assert notice == (
        "twice is new; an earlier mesh of that name still runs, though no variable refers to it: "
        "%stop --unused ends it\n"
    )
    assert "stopped twice: 4 actors" in nb.run("%stop --unused").ok().stdout
    notice = nb.run("kept = twice\n" + spawn).ok().stdout
    assert notice.startswith("another mesh named twice runs already, held by kept: give one of them another name")
    assert nb.run("twice.step.call().get().values()").text == "[1, 1, 1, 1]"
    nb.run("%stop twice\ntwice = kept\n%stop twice").ok()
