"""Values of ranks' own in a real kernel: displays, `%tensors`, views and time-lines show that each rank has its own."""

from contextlib import closing

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import torch, monarch
from monarch.actor import this_host
own = this_host().spawn_procs({"gpus": 2}, name="own")
comms = monarch.Stream("comms")
with own.activate() as mesh:
    value = torch.arange(2.0) + mesh.rank_tensor("gpus")
with own.activate(), comms.activate():
    elsewhere = torch.ones(3)
def number(t):
    print(t.reference.stream.number, t.reference.number)
"""


@pytest.fixture(scope="module")
def nb(blank: Notebook) -> Notebook:
    blank.run("%load_ext monarch").ok()
    blank.run(PROGRAM, timeout=60).ok()
    return blank


def test_a_value_is_shown_as_one_of_each_rank(nb: Notebook) -> None:
    shown = nb.run("value").ok()
    assert "gpus=2  own value on each rank  2 ranks, each with a value of its own" in shown.text
    assert "8 B on each rank, 16 B on the mesh" in shown.text
    assert shown.text.endswith("that of one rank: monarch.inspect(value, gpus=1), by rank: value.local_shards()")
    assert "each with a value of its own" in shown.html
    assert nb.run("monarch.inspect(value, gpus=1)").ok().text == "tensor([1., 2.])"
    assert nb.run("print(value)").ok().stdout.startswith("tensor([0., 1.])  # on rank 0; rank 1 differs")


def test_the_view_has_a_table_of_each_ranks_value(nb: Notebook) -> None:
    with closing(ViewClient(nb)) as view:
        view.watch()
        key, number = nb.run("number(value)").ok().stdout.split()
        table = view.ask("values", tensors=key, number=int(number))["result"]
    assert table["columns"][:5] == ["ranks", "elements", "min", "max", "mean"]
    assert [row[:5] for row in table["rows"]] == [["0", "2", "0", "1", "0.5"], ["1", "2", "1", "2", "1.5"]]
    assert "each rank has a value of its own" in table["notes"][0]


def test_tensors_magic_lists_values_by_stream_and_what_ranks_exchanged(nb: Notebook) -> None:
    nb.run("total = value.reduce('gpus')\ntotal.tolist()").ok()
    main, comms = nb.run("%tensors").ok().text.split("\n\n")
    assert main.startswith("own · gpus=2 · 2 tensors")
    assert "value  2 float32  own value on each rank  8 B" in main
    assert "the last cell moved 8 B in 1 all-reduce, from Cell In[" in main
    assert comms.startswith("own, stream comms · gpus=2 · 1 tensor ")
    assert "elsewhere" in comms


def test_a_mesh_is_active_from_one_cell_to_the_next(nb: Notebook) -> None:
    nb.run("mesh.activate()").ok()
    assert "own value on each rank" in nb.run("later = torch.ones(2)\nlater").ok().text
    nb.run("mesh.deactivate()").ok()
    assert nb.run("torch.ones(2)").ok().text == "tensor([1., 1.])"


FUNCTIONS = """
import time
@monarch.remote(propagate=lambda x: x.clone())
def halted(x):
    twice = x * 2
    breakpoint()
    return twice
@monarch.remote(propagate=lambda x: x.clone())
def asleep(x):
    print("asleep", flush=True)
    time.sleep(600)
    return x
"""


def test_a_breakpoint_on_a_stream_is_debugged_from_cells(nb: Notebook) -> None:
    nb.run(FUNCTIONS).ok()
    cell = nb.run("with comms.activate():\n    result = halted(elsewhere)\n    monarch.inspect(result)")
    assert "StoppedAtBreakpoint" in cell.traceback
    assert "thread stream comms" in cell.traceback
    assert nb.run("monarch.inspect(value * 2, gpus=1)").ok().text == "tensor([2., 4.])"
    assert "[2.0, 2.0, 2.0]" in nb.run("%%mdb\np twice.tolist()\nc all").ok().text
    assert nb.run("with comms.activate():\n    found = result.tolist()\nfound").ok().text == "[2.0, 2.0, 2.0]"


def test_two_interrupts_of_a_fetch_end_what_its_stream_runs(nb: Notebook) -> None:
    nb.run(FUNCTIONS).ok()
    request = nb.start("with comms.activate():\n    lost = asleep(elsewhere)\n    monarch.inspect(lost)")
    nb.until(request, Cell(), "asleep")
    nb.interrupt()
    assert "stopped waiting" in nb.finish(request).traceback
    nb.interrupt()
    nb.shows(request, "Interrupted own_streams.batch")
    assert nb.run("with comms.activate():\n    found = elsewhere.tolist()\nfound").ok().text == "[1.0, 1.0, 1.0]"
