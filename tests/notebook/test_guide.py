"""%monarch shows the way in: what to type first, what is running, and what the doctor finds."""

import re

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_what_the_guide_says_to_type_first_works_when_it_is_typed() -> None:
    notebook = Notebook()
    try:
        guide = notebook.run("%monarch").ok()
        assert "No processes have been started yet" in guide.text
        assert re.findall(r"<b>(Monarch-NB [\d.]+)", guide.html)
        typed = re.findall(r"^  (\S.*?)  ", guide.text, re.MULTILINE)
        assert typed.index("%mesh workers gpus=4") == 0
        bodies = {"%%on": "rank", "%%actor": "from monarch.actor import Actor, endpoint\n" + TRAINER}
        for line in typed:
            if line != "%mesh?" and line != "%monarch doctor":
                body = bodies.get(line.split()[0])
                cell = notebook.run(line if body is None else f"{line}\n{body}").ok()
                assert cell.stderr == "", line
            if line.startswith("trainers.step"):
                assert "all 4 ranks: 1" in cell.text
        later = notebook.run("%mesh few gpus=1\n%monarch").ok()
        assert "Running now" in later.text
        assert "few" in later.text
        assert "few" in later.html
    finally:
        notebook.close()


TRAINER = """
class Trainer(Actor):
    @endpoint
    def step(self):
        return 1
"""


def test_the_doctor_looks_at_the_kernel_and_at_each_host(nb: Notebook) -> None:
    nb.run("from monarch.actor import local_hosts; doctored = local_hosts(2)").ok()
    meshes = nb.run("%meshes").ok().text
    found = nb.run("%monarch doctor").ok()
    assert found.stderr == ""
    assert "No problems were found." in found.text or "✗" not in found.text
    for about in ("kernel ", "comm ", "a process", "open files", "ports", "shared memory", "versions"):
        assert f"✓ {about}" in found.text or f"! {about}" in found.text, about
    assert "this machine" in found.html
    assert nb.run("%meshes").ok().text == meshes  # what it has started is gone
    nb.run("doctored.shutdown().get()").ok()


def test_a_word_that_the_guide_does_not_know_is_refused_with_those_it_knows(nb: Notebook) -> None:
    assert "Write %monarch, or %monarch doctor" in nb.run("%monarch help me").stderr
    assert nb.complete("%monarch do")[0] == "doctor"
