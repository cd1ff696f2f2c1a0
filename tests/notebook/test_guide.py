"""%monarch is the introduction: first commands, what is running, and the findings of the doctor."""

import json
import queue
import re

import pytest

from tests.notebook.dap_client import Debugger
from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_commands_the_guide_suggests_first_work_when_typed() -> None:
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
        second = notebook.run("%mesh few gpus=1\n%monarch").ok()
        assert "Running now" in second.text
        assert "few" in second.text
        assert "few" in second.html
    finally:
        notebook.close()


TRAINER = """
class Trainer(Actor):
    @endpoint
    def step(self):
        return 1
"""


def test_running_meshes_can_be_typed_under_the_names_the_guide_uses(nb: Notebook) -> None:
    """A variable may hold a mesh under another name than it was spawned with, and hold something else under that."""
    nb.run("%stop --all").ok()
    nb.run("from monarch.actor import this_host\nheld = {'procs': this_host().spawn_procs(name='few')}\nfew = 1").ok()
    for more in ("", "del few", "kept = held['procs']\nfew = this_host()"):
        nb.run(more).ok()
        [typed] = re.findall(r"^  (%logs .*?)  ", nb.run("%monarch").ok().text, re.MULTILINE)
        logs = nb.run(typed).ok()
        assert logs.stderr == "", typed
    assert typed.split() == ["%logs", "kept"]
    nb.run("%stop --all\ndel few, kept, held").ok()


def test_the_doctor_looks_at_the_kernel_and_at_each_host(nb: Notebook) -> None:
    nb.run("from monarch.actor import local_hosts; doctored = local_hosts(2)").ok()
    meshes = nb.run("%meshes").ok().text
    report = nb.run("%monarch doctor").ok()
    assert report.stderr == ""
    assert "No problems were found." in report.text or "✗" not in report.text
    for about in ("kernel ", "comm ", "a process", "open files", "ports", "shared memory", "versions"):
        assert f"✓ {about}" in report.text or f"! {about}" in report.text, about
    assert "this machine" in report.html
    assert nb.run("%meshes").ok().text == meshes  # the processes that it started have ended
    nb.run("doctored.shutdown().get()").ok()


# The variables that identify each front end; JupyterLab's own variable is set by most of them.
FRONT_ENDS = {
    "JupyterLab or Notebook 7": {"JPY_SESSION_NAME": "/home/me/a.ipynb"},
    "JupyterLab of a JupyterHub": {"JPY_SESSION_NAME": "/home/me/a.ipynb", "JUPYTERHUB_API_URL": "http://hub"},
    "Lightning Studio": {"JPY_SESSION_NAME": "/home/me/a.ipynb", "LIGHTNING_CLOUD_PROJECT_ID": "1"},
    "Colab": {"JPY_SESSION_NAME": "/home/me/a.ipynb", "COLAB_RELEASE_TAG": "r1"},
    "VS Code": {"VSCODE_PID": "1"},
}
LEVELS = """
def _told():
    import json, os
    from monarch_kernel.doctor import facts_of, levels
    before = dict(os.environ)
    for name in ("JPY_SESSION_NAME", "JUPYTERHUB_API_URL"):
        os.environ.pop(name, None)
    os.environ.update({signs!r})
    try:
        print(json.dumps({{one.about: one.found for one in levels(facts_of(get_ipython()))}}))
    finally:
        os.environ.clear()
        os.environ.update(before)
_told()
"""


def test_doctor_reports_the_front_ends_abilities_as_this_kernel_has_them(nb: Notebook) -> None:
    view = ViewClient(nb)
    past_cells = view.subshell is not None
    view.close()
    widget = "application/vnd.jupyter.widget-view+json" in nb.finish(nb.start("w", asks=True)).ok().result
    try:
        debugger = Debugger(nb).ask("debugInfo", timeout=5).get("success", False)
    except queue.Empty:
        debugger = False
    for name, signs in FRONT_ENDS.items():
        levels = json.loads(nb.finish(nb.start(LEVELS.format(signs=signs), asks=True)).ok().stdout)
        assert levels["front end"].startswith(name)
        assert levels["displays"].startswith("live") is widget, name
        assert levels["buttons"].startswith("none") is not widget, name
        assert "the running cell ends" not in levels["buttons"] or not past_cells, name
        assert not levels["buttons"].startswith("they work while a cell runs") or past_cells, name
        if name != "Colab":
            assert ("this kernel has no debugger" in levels["bug button"]) is not debugger, name
        plain = json.loads(nb.run(LEVELS.format(signs=signs)).ok().stdout)  # a cell that takes no questions
        assert "StoppedAtBreakpoint" in plain["debugger"]
        assert "StoppedAtBreakpoint" not in levels["debugger"]


def test_an_unknown_word_is_refused_with_the_list_of_known_ones(nb: Notebook) -> None:
    assert "Write %monarch, or %monarch doctor" in nb.run("%monarch help me").stderr
    assert nb.complete("%monarch do")[0] == "doctor"
