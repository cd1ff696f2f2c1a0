"""A mesh of tensors in a notebook whose cells are interrupted, stopped, inspected and broken."""

import re
import time
from contextlib import closing
from typing import Any

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(180)

SETUP = """
import os, signal, time
import torch
import torch.distributed as dist
import monarch, monarch.debug
from monarch.distributed import Mesh, TensorError
mesh = Mesh(shape=(2,), mesh_dim_names=("data",), name="pair")
t = monarch.distribute(torch.arange(4.0), mesh, ["data"])
other = mesh.zeros(4)

def alone(part):
    if dist.get_rank() == 1:
        print("begun", flush=True)
        dist.all_reduce(part)

def asleep():
    print("asleep", flush=True)
    time.sleep(600)

def halved(part):
    rank = dist.get_rank()
    breakpoint()
    return float(part.sum()) / 2
"""


@pytest.fixture(scope="module")
def nb(blank: Notebook) -> Notebook:
    blank.run("%load_ext monarch").ok()
    blank.run(SETUP, timeout=60).ok()
    return blank


def test_a_cell_on_the_processes_sees_its_shard_under_its_name(nb: Notebook) -> None:
    assert nb.run("%%on mesh\nt.mul_(10)\n(type(t).__name__, t.tolist())").ok().text.count("Tensor") == 2
    assert nb.run("t.tolist()").text == "[0.0, 10.0, 20.0, 30.0]"
    assert nb.run("%%on mesh data=1\nt.tolist()").ok().text.endswith("[20.0, 30.0]")
    assert "False" in nb.run("%%on mesh\n't' in globals()").ok().text
    nb.run("t.copy_(torch.arange(4.0))").ok()


@pytest.mark.parametrize(
    ("code", "text", "ranks"),  # the answer of data=0, which enters nothing, may still be under way
    [("mesh.execute(alone, other)", "begun", "data=(0-)?1"), ("mesh.execute(asleep)", "asleep", "data=0-1")],
    ids=["a collective that nobody else enters", "a function"],
)
def test_interrupting_a_wait_and_then_the_ranks_leaves_tensors_unchanged(
    nb: Notebook, code: str, text: str, ranks: str
) -> None:
    request = nb.start(code)
    nb.until(request, Cell(), text)
    nb.interrupt()
    assert "stopped waiting" in nb.finish(request).traceback
    nb.interrupt()
    notice = nb.shows(request, "Interrupted")
    assert re.search(f"Interrupted pair_workers.batch\\(\\) on pair_workers {ranks}", notice), notice
    assert nb.run("t.sum().item()").ok().text == "6.0"


BETWEEN_WAITS = """
import signal
from monarch_nb.runtime import waiting
from monarch_nb.tensor.commands import RunFunction

class StopAtEnd(waiting.WaitObserver):
    def begin(self, future, timeout):
        waiting.leave(self)
        return lambda: signal.raise_signal(signal.SIGINT)

mesh.stream.issue_object(RunFunction(time.sleep, (0.5,), {}))
mesh.stream.flush()
waiting.join(StopAtEnd())
mesh.execute(asleep)
"""


def test_a_press_between_two_waits_is_explained_as_within_one(nb: Notebook) -> None:
    request = nb.start(BETWEEN_WAITS)
    assert "stopped waiting" in nb.finish(request).traceback
    nb.interrupt()
    assert "Interrupted pair_workers.batch() on pair_workers" in nb.shows(request, "Interrupted")
    assert nb.run("t.sum().item()").ok().text == "6.0"


def test_a_breakpoint_in_a_function_that_the_ranks_run_stops_there(nb: Notebook) -> None:
    cell = nb.run("mesh.execute(halved, t)")
    assert "StoppedAtBreakpoint" in cell.traceback
    assert "[2.0, 3.0]  data=1" in nb.run("%%mdb\np part.tolist()\nc all").ok().text
    assert nb.run("t.sum().item()").ok().text == "6.0"


def test_ranks_that_are_interrupted_later_leave_the_tensors_as_they_are(nb: Notebook) -> None:
    request, cell = nb.start("mesh.execute(alone, other)"), Cell()
    nb.until(request, cell, "begun")
    nb.interrupt()
    assert "%interrupt pair_workers ends it there" in nb.finish(request).traceback
    nb.run("%interrupt mesh").ok()
    assert nb.run("t.sum().item()").ok().text == "6.0"


COMPILED = """
import threading
from monarch_nb.runtime import waiting
model = torch.nn.Linear(4, 4).to(mesh.device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = monarch.distribute(torch.ones(4, 4), mesh, ["data", None])

@monarch.compile
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

class Say(waiting.WaitObserver):
    def tick(self, future, seconds):
        print("waits", flush=True)

for _ in range(5):
    step(x)
assert step.calls > 0 and step(x).item() > 0
pid = mesh.execute(os.getpid).values()[1]
"""


@pytest.mark.slow
def test_an_interrupt_frees_ranks_in_a_compiled_step(nb: Notebook) -> None:
    nb.run(COMPILED).ok()
    request, cell = nb.start("say = Say()\nwaiting.join(say)\nos.kill(pid, signal.SIGSTOP)\nstep(x).item()"), Cell()
    nb.until(request, cell, "waits")
    nb.interrupt()
    assert "KeyboardInterrupt" in nb.finish(request).traceback
    nb.interrupt()
    nb.shows(request, "has not stopped within 5 s")
    nb.run("waiting.leave(say)\nos.kill(pid, signal.SIGCONT)").ok()
    assert nb.run("t.sum().item()").ok().text == "6.0"
    lost = nb.run("model.weight.sum().item()").traceback
    assert "this needs a tensor that was lost on ranks 0, 1 of pair: it was interrupted" in lost
    assert "restore it: monarch.checkpoint" in lost
    nb.run(
        "with torch.no_grad():\n    for each in model.parameters():\n        each.copy_(torch.ones(each.shape))"
    ).ok()
    assert nb.run("step(x).item()").ok().text == "25.0"


def test_tensors_magic_reports_memory_and_the_shards_moved_last(nb: Notebook) -> None:
    nb.run("def product(t):\n    return (t * t.sum()).sum()\nagain = monarch.compile(product)").ok()
    nb.run("for _ in range(5):\n    again(t)").ok()
    for cell in ("product(t).item()", "again(t).item()"):
        assert nb.run(cell).ok().text == "36.0"
        text = nb.run("%tensors").ok().text
        assert re.search(r"live: .*\nmemory of the processes: .*MB.*, at most .*MB", text)
        assert re.search(r"ranks were busy with it, or waited for each other, for [0-9.]+ m?s along data", text)
        assert "0.0 ms along" not in text
    nb.run("pass").ok()
    assert "busy with it" in nb.run("%tensors").text  # of the last cell that moved something


def test_a_mesh_of_tensors_is_shown_as_others_and_counts_once(nb: Notebook) -> None:
    cell = nb.run("mesh").ok()
    assert re.fullmatch(r"<Mesh 'pair' \{data=2\} on mesh:\d+>\n  \d+ tensors, \d+ B", cell.text)
    assert "for tensors on mesh:" in cell.html
    assert "pair_workers" not in cell.html
    overview = nb.run("%meshes").ok().text
    assert [line.split()[:3] for line in overview.splitlines() if "pair" in line] == [["pair", "procs", "data=2"]]
    assert overview.splitlines()[1].split()[-1] == "mesh"
    with closing(ViewClient(nb)) as view:
        view.watch()
        view.until(lambda view: view.mesh("pair_workers") != "")
        assert view.state["meshes"][view.mesh("pair_workers")]["inner"] is True
        assert "inner" not in view.state["meshes"][view.mesh("pair")]


INSPECTED = """
looked = monarch.distribute(torch.tensor([[1.0, float("nan")], [float("inf"), 4.0]]), mesh, ["data", None])
parts = [torch.distributed.tensor.Partial()]
rows = monarch.distribute(torch.arange(100).reshape(10, 10), mesh).redistribute(placements=parts)

def broken(part):
    if part[0].start:
        raise ValueError("no such part")
    return torch.ones(part[0].stop - part[0].start)

half = mesh.from_parts(broken, size=(4,), sharding_spec=["data"])
def number(t):
    print(t.reference.stream.number, t.reference.number)
"""


def inspect(nb: Notebook, view: ViewClient, name: str) -> dict[str, Any]:
    key, number = nb.run(f"number({name})").ok().stdout.split()
    return view.ask("values", tensors=key, number=int(number))


def test_views_show_values_during_a_cell_or_why_there_are_none(nb: Notebook) -> None:
    nb.run(INSPECTED).ok()
    assert "full_tensor() gives its values" in nb.run("repr(t)").text
    assert nb.run("t").ok().text.endswith("its values: t.full_tensor(), by rank: t.local_shards()")
    with closing(ViewClient(nb)) as view:
        view.watch()
        table = inspect(nb, view, "looked")["result"]
        assert (table["corner"], table["index"], table["notes"]) == ([["1", "nan"], ["inf", "4"]], "", [])
        assert table["rows"] == [["0", "2", "1", "1", "1", "1", "0"], ["1", "2", "4", "inf", "4", "0", "1"]]
        table = inspect(nb, view, "rows")["result"]
        assert table["corner"][7] == [str(number) for number in range(70, 78)]
        assert table["index"] == "[0:8, 0:8]"
        assert "each rank has a part of every value" in table["notes"][0]
        table = inspect(nb, view, "half")["result"]
        assert table["corner"] == [["1", "1", "·", "·"]]
        assert table["notes"] == ["rank 1: the operation that makes it has failed: ValueError: no such part"]
        assert "no such part" in nb.run("half.sum().item()").traceback  # inspecting takes nothing away from waiters

        key, number = nb.run("number(looked)").ok().stdout.split()
        request, cell = nb.start("mesh.execute(asleep)"), Cell()
        nb.until(request, cell, "asleep")
        table = view.ask("values", tensors=key, number=int(number))["result"]
        assert table["corner"] == [["1", "nan"], ["inf", "4"]]
        assert table["notes"] == ["ranks 0-1: it still does what was issued before: these are its values now"]
        nb.interrupt()
        nb.finish(request)
        nb.interrupt()
        nb.shows(request, "Interrupted")

        nb.run("del looked\nimport gc; gc.collect()").ok()
        deadline = time.monotonic() + 20  # the thread that answered last lets go of the tensor after its answer
        while (answer := view.ask("values", tensors=key, number=int(number)))["ok"] and time.monotonic() < deadline:
            pass
        assert (answer["ok"], answer.get("error")) == (False, "this tensor is gone: nothing refers to it any more")


def test_a_view_says_that_values_went_with_a_process(nb: Notebook) -> None:
    nb.run("mortal = Mesh(shape=(2,), mesh_dim_names=('data',), name='mortal')").ok()
    nb.run("left = monarch.distribute(torch.arange(4), mortal, ['data'])").ok()
    nb.run("os.kill(mortal.execute(os.getpid).values()[1], signal.SIGKILL)").ok()
    assert "mortal" in nb.run("left.sum().item()").traceback
    with closing(ViewClient(nb)) as view:
        view.watch()
        error = inspect(nb, view, "left")["error"]
    assert error.startswith("its contents are gone: ")
    assert "process" in error
    nb.run("mortal.stop().get()").ok()


@pytest.mark.slow
def test_an_error_of_the_ranks_names_the_line_of_the_cell(nb: Notebook) -> None:
    cell = nb.run("table = torch.nn.Embedding(4, 2).to(mesh.device)\ntable(mesh.full((2,), 99)).sum().item()")
    assert "issued at Cell In[" in cell.traceback
    assert "]:2\n    table(mesh.full((2,), 99)).sum().item()" in cell.traceback
    assert "Cell In[" in nb.run("t[:, None, None].nonzero()").traceback


@pytest.mark.slow
def test_a_mesh_is_stopped_without_a_word_about_pending_work(nb: Notebook) -> None:
    cell = nb.run("for _ in range(500):\n    other.add_(1)\nleft = mesh.stop()").ok()
    after = nb.run("left.get()\nleft = None\nimport gc, time; gc.collect(); time.sleep(0.2)").ok()
    assert "waited" not in cell.stderr + after.stderr
    assert "stopped" in nb.run("t.sum()").traceback
    text = nb.run("%tensors").ok().text
    assert "the mesh was stopped: stopped by client" in text
    assert re.search(r"t +4 float32 +Shard\(0\) +lost", text)
