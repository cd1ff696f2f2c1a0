"""Meshes outlive a real kernel: it is restarted, or killed, and the next one goes on with them under their names."""

import os
import secrets
import signal
from pathlib import Path

import pytest

from scripts.processes import MARK, left_behind
from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

COUNTER = """
import os
from monarch.actor import Actor, endpoint

class Counter(Actor):
    def __init__(self):
        self.n = 0
    @endpoint
    def add(self, more):
        self.n += more
        print("counted to", self.n)
        return self.n
    @endpoint
    def stopped(self):
        here = self.n
        breakpoint()
        return here

%mesh trainers gpus=2
mine = trainers.spawn("counter", Counter)
mine.add.call(5).get().values()
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train.ipynb")
    return tmp_path


def test_a_restarted_kernel_goes_on_with_its_mesh_and_names(files: Path) -> None:
    notebook = Notebook()
    try:
        assert notebook.run(COUNTER).ok().text == "[5, 5]"
        pids = notebook.run("trainers.run(os.getpid).get().values()").ok().text
        notebook.run("waits = mine.slice(gpus=1).stopped.call_one()").ok()
        notebook.run("row = trainers.flatten('all'); last = mine.slice(gpus=1)").ok()
        detached = notebook.run("%detach trainers mine trainers --lease 2m").ok()
        assert detached.stdout.count("is left for 2m: %attach trainers comes back to it") == 1
        assert "attach" in notebook.run("mine.add.call(1).get()").traceback
        notebook.restart()
        listed = notebook.run("%attach").ok().stdout
        assert "trainers {gpus=2} with counter on " in listed
        assert "it was detached" in listed
        assert notebook.complete("%attach tr") == ["trainers"]
        back = notebook.run("%attach trainers").ok()
        assert "trainers is back: 2 procs with counter; left " in back.stdout
        assert "counter.stopped() runs on gpus=1" in back.stdout
        assert notebook.run("trainers.run(__import__('os').getpid).get().values()").ok().text == pids
        assert notebook.run("mine.slice(gpus=0).add.call_one(2).get()").ok().text == "7"
        assert notebook.run("[row.sizes, last == mine.slice(gpus=1)]").ok().text == "[{'all': 2}, True]"
        notebook.run("import monarch.debug as debug; debug.wait(timeout=10)").ok()
        assert notebook.run("[(one.name, one.point) for one in debug.sessions()]").ok().text == "[('counter', (1,))]"
        assert "5" in notebook.run("print(debug.eval('here + 0'))").ok().stdout
        notebook.run("debug.resume()").ok()
        assert notebook.run("mine.slice(gpus=1).add.call_one(3).get()").ok().text == "8"
        assert "[0] " in notebook.run("found = %results mine\nprint(found)").ok().stdout
        assert notebook.run("[found[0].endpoint, found[0].ranks, found[0].get()]").ok().text == "['stopped', (1,), 5]"
        assert notebook.run("%results mine --forget").ok().text == "no call of counter has ended while nobody was there"
        notebook.run("%mesh trainers gpus=2").ok()  # the line that spawned it finds it
        assert notebook.run("trainers.run(__import__('os').getpid).get().values()").ok().text == pids
        assert "stopped trainers" in notebook.run("%stop trainers").ok().stdout
        assert "no mesh was left" in notebook.run("%attach").ok().stdout
    finally:
        notebook.close()


def test_meshes_of_one_name_are_attached_by_their_ids(files: Path) -> None:
    owner, other = Notebook(), Notebook()
    try:
        owner.run(COUNTER).ok()
        other.run(COUNTER).ok()
        owner.run("%detach trainers").ok()
        shown = other.run("%attach trainers").ok().stdout
        assert "trainers is here; another mesh of this name was left: %attach p" in shown
        attached = other.run(shown.partition("left: ")[2].strip()).ok()
        assert attached.text == "<ProcMesh 'trainers' {gpus=2}>"
        assert "the variable trainers holds something else: the mesh is trainers_2" in attached.stdout
        assert other.run("trainers_2 == trainers, mine_2.add.call(1).get().values()").ok().text == "(False, [6, 6])"
        other.run("first = trainers\n%mesh trainers gpus=2").ok()
        assert other.run("trainers == first").ok().text == "True", "its line is not that of the mesh that was attached"
        other.run("%stop trainers").ok()
        other.run("del trainers_2, mine_2, first").ok()
        assert other.run("%detach trainers").ok().stdout.startswith("trainers is left"), "the one that lives"
        other.run("get_ipython().run_line_magic('attach', 'trainers').stop().get()").ok()
    finally:
        owner.close()
        other.close()


@pytest.mark.slow
def test_a_killed_kernel_leaves_its_kept_mesh_and_takeovers_are_reported(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    notebook = Notebook()
    try:
        assert "live on for 2m" in notebook.run("%detach --keep 2m").ok().stdout
        notebook.run(COUNTER).ok()
        os.kill(notebook.pid, signal.SIGKILL)
    finally:
        notebook.close()
    first, second = Notebook(), Notebook()
    try:
        back = first.run("%attach trainers").ok().stdout
        assert "the process that owned it is gone" in back
        assert first.run("mine.add.call(1).get().values()").ok().text == "[6, 6]"
        refused = second.run("%attach trainers").traceback
        assert f"held by the kernel of train.ipynb (process {first.pid} on" in refused
        assert "taken over from the kernel of train.ipynb" in second.run("%attach trainers --steal").ok().stdout
        assert second.run("mine.add.call(1).get().values()").ok().text == "[7, 7]"
        traceback = first.run("mine.add.call(1).get()").traceback
        assert f"taken over by the kernel of train.ipynb (process {second.pid} on" in traceback
        second.run("%stop trainers").ok()
        os.kill(second.pid, signal.SIGKILL)  # the last owner of a mesh on the host of the first
    finally:
        first.close()
        second.close()
    assert left_behind(mark) == []
