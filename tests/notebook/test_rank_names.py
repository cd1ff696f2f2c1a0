"""Completion and inspection in cells that run on ranks, in a real kernel."""

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)
SETTINGS = """%%on w
import types
settings = types.SimpleNamespace(learning_rate=0.1, layers=[1, 2])
def scaled(x: float, by: float = 2.0) -> float:
    "Multiplies."
    return x * by
"""


def test_names_of_ranks_are_completed_and_described(nb: Notebook) -> None:
    nb.run(SETTINGS).ok()
    nb.run("local_name = 3").ok()
    assert nb.complete("%%on w gpus=1\nx = settings.lea") == ["settings.learning_rate"]
    assert "settings" in nb.complete("%%on w\nx = sett")
    assert "local_name" in nb.complete("local_n")
    text = nb.inspect("%%on w gpus=1\nscaled")
    assert "Signature: scaled(x: float, by: float = 2.0) -> float" in text
    assert "Multiplies." in text
    assert "return x * by" in nb.inspect("%%on w\nscaled", detail=1)
    assert "0.1" in nb.inspect("%%on w\nsettings.learning_rate")
    assert "local_name" not in nb.inspect("%%on w\nscaled")


def test_names_of_actors_are_those_of_their_cells(nb: Notebook) -> None:
    nb.run("%%on a\nself.noted = [1, 2, 3]").ok()
    assert nb.complete("%%on a\nself.not") == ["self.noted"]
    assert "[1, 2, 3]" in nb.inspect("%%on a gpus=2\nself.noted")


def test_busy_ranks_answer_and_lost_ones_leave_it_to_the_kernel(nb: Notebook) -> None:
    nb.run(SETTINGS).ok()
    nb.run("from monarch.actor import run_on; busy = run_on(w, 'import time; time.sleep(60)')").ok()
    assert nb.complete("%%on w\nsettings.la") == ["settings.layers"]
    nb.run("%interrupt w").ok()
    assert nb.run("busy.get(20)").error is not None
    nb.run("import os, signal; os.kill(w.run(os.getpid).get().values()[0], signal.SIGKILL); local_name = 3").ok()
    assert "local_name" in nb.complete("%%on w\nlocal_n")
    nb.run("heal_mesh(w)").ok()


def test_variables_of_ranks_are_listed_with_who_differs(nb: Notebook) -> None:
    view = ViewClient(nb)
    view.watch()
    view.until(lambda view: bool(view.mesh("a")))
    nb.run("%%on w\nfactor, own = 0.5, rank % 2").ok()
    nb.run("%%on w gpus=3\nextra = [1, 2]").ok()
    nb.run("%%on a\nself.noted = rank").ok()

    def values(name: str, mesh: str, **more: object) -> list[tuple[str, str, str]]:
        answer = view.ask("namespace", mesh=view.mesh(mesh), **more)["result"]
        [row] = [row for row in answer["rows"] if row["name"] == name]
        return [(value["type"], value["text"], value["where"]) for value in row["values"]]

    try:
        nb.run("from monarch.actor import run_on; busy = run_on(w, 'import time; time.sleep(60)')").ok()
        assert values("factor", "w") == [("float", "0.5", "")]
        assert values("own", "w") == [("int", "0", "gpus=0,2"), ("int", "1", "gpus=1,3")]
        assert values("extra", "w") == [("list", "[1, 2]", "gpus=3")]
        assert values("own", "w", ranks=[1, 3]) == [("int", "1", "")]
        assert len(values("self.noted", "a")) == 4
        nb.run("%interrupt w").ok()
        assert nb.run("busy.get(20)").error is not None
    finally:
        view.close()
