"""Meshes that nothing refers to: marked, kept while anything holds them, ended when there are more than the limit."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(180)

HOLDER = """\
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch_nb.runtime import current_runtime
from monarch_nb.store.hub import store_of

class Keeper(Actor):
    @endpoint
    def keep(self, mesh):
        self.mesh = mesh

def marked():
    return sorted(m["name"] for m in store_of(current_runtime()).document()["meshes"].values() if m.get("unheld"))

def living():
    return sorted(state.name for state in current_runtime().meshes.values()
                  if state.stopped is None and state.spawn_spec is not None and state.kind == "procs")

def procs(name):
    mesh = this_host().spawn_procs(per_host={"gpus": 1}, name=name)
    mesh.initialized.get()
    return mesh
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", "")
        opened = Notebook()
    try:
        opened.run(HOLDER.replace('and state.kind == "procs"', 'and hasattr(state, "layout")')).ok()
        opened.run("configure(mesh_unheld_memory=0)").ok()  # whatever the memory of this machine
        yield opened
    finally:
        opened.close()


def printed(notebook: Notebook, expression: str) -> str:
    return notebook.run(expression).ok().text


def test_a_mesh_is_marked_once_nothing_holds_it_and_no_sooner(notebook: Notebook) -> None:
    notebook.run("named = procs('named')\nlost = procs('lost')\ninside = {'deep': [procs('inside')]}\nalso = lost").ok()
    notebook.run("procs('shown')").ok()  # in Out[], and in _
    notebook.run("part = procs('sliced').slice(gpus=0)").ok()
    notebook.run("actors = procs('under').spawn('keepers', Keeper); actors.initialized.get()").ok()
    notebook.run("actors.keep.call(procs('sent')).get();").ok()
    assert printed(notebook, "marked()") == "[]"
    notebook.run("del lost").ok()
    assert printed(notebook, "marked()") == "[]", "another variable has it"
    notebook.run("del also").ok()
    assert printed(notebook, "marked()") == "['lost']"
    assert "lost" in printed(notebook, "living()"), "it is only marked"
    assert "lost" in notebook.run("%meshes").ok().text
    notebook.run("import monarch_nb.mesh\nback = procs('other')").ok()
    notebook.run("del back, inside, part").ok()
    assert printed(notebook, "marked()") == "['inside', 'lost', 'other', 'sliced']"


def test_the_oldest_unheld_meshes_beyond_the_limit_end_with_a_notice(notebook: Notebook) -> None:
    cell = notebook.run("configure(mesh_unheld_most=2)").ok()
    while printed(notebook, "len(marked())") != "2":
        notebook.run("import time; time.sleep(0.05)").ok()
    assert (
        "ends: nothing refers to it any more, and there are more than 2 such meshes (mesh_unheld_most)" in cell.stdout
    )
    living = printed(notebook, "living()")
    assert all(name in living for name in ("named", "shown", "under", "sent")), living
    notebook.run("configure(mesh_unheld_most=16, mesh_unheld_timeout='1ms')").ok()
    while printed(notebook, "marked()") != "[]":
        notebook.run("import time; time.sleep(0.05)").ok()
    assert printed(notebook, "living()") == "['named', 'sent', 'shown', 'under']"
    notebook.run("configure(mesh_unheld_timeout='0s')").ok()
