"""Live displays in a real JupyterLab: ranks at work while a cell blocks, dying, healed by a click, after a reload."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.lab import CLEAR, KERNEL_IS_IDLE, Desk, Lab, write_notebook
from tests.browser.seen import Sighting, rank, timing
from tests.ports import kernel_ports

if TYPE_CHECKING:
    from nbformat import NotebookNode

pytestmark = pytest.mark.timeout(240)

BEGIN = """
import os, time
os.environ["MONARCH_NB_PRELOAD"] = ""  # nothing here needs torch
%load_ext monarch
from monarch.actor import Actor, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, seconds):
        print("one step")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.02)

    @endpoint
    def until(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def die(self):
        os.kill(os.getpid(), 9)

    @endpoint
    def divide(self, number):
        return 1 / number

    @endpoint
    def curve(self):
        from monarch.telemetry import log
        for step in range(20):
            log(step=step, loss=1 / (step + 1))
"""
MESHES = """
%mesh workers gpus=4
trainers = workers.spawn("trainers", Trainer)
print(list(trainers.pid.call().get().values()))
workers
"""


SAVED = (
    "trainers.curve.call().get(); trainers.step.call(0.1).get()",
    "trainers.slice(gpus=2).die.call_one().get()",
    "%failures",
    "%logs trainers",
    "trainers.metrics",
    "workers",
)
# All cells of the notebook are in the page.
ALL_CELLS = """() => {
    const count = window.jupyterapp.shell.currentWidget.content.model?.sharedModel.cells.length;
    return count > 1 && document.querySelectorAll(".jp-Notebook .jp-Cell").length === count;
}"""
# Ranks in the store alone.
LARGE = """
from monarch_nb.runtime import current_runtime
from monarch_nb.store import events, store_of
from monarch_kernel import _loaded
store = store_of(current_runtime())
store.put(events.MeshDescription(uid="many", name="fleet", kind="procs", ranks=range(2400), labels=("hosts", "gpus"),
    sizes=(300, 8), strides=(8, 1), hosts=tuple(f"node{i}" for i in range(300)), per_host=8, ready=True, at=1.0))
store.put(events.RankStateChanged("many", 59, "failed", 0, 2.0, "it ended by signal 9 (SIGKILL)"))
next(iter(_loaded.values()))._widgets.show("mesh", {"mesh": "many"}, None)
"""


@pytest.fixture(scope="module")
def notebook(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    path = write_notebook(tmp_path_factory.mktemp("live") / "live.ipynb", [BEGIN])
    with desk.open(path) as shown:
        opened = Lab(shown)
        opened.run(BEGIN)
        yield opened
        opened.run("%stop --all")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> "NotebookNode":
    """A notebook that nbclient has run: a mesh of which one rank has died."""
    import nbformat  # here: Jupyter's libraries take seconds, and collecting tests must not
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    path = write_notebook(tmp_path_factory.mktemp("executed") / "saved.ipynb", [BEGIN, MESHES, *SAVED])
    run = nbformat.read(path, 4)

    class Manager(AsyncKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, **kernel_ports())

    return NotebookClient(run, kernel_manager_class=Manager, timeout=60, allow_errors=True).execute()


@pytest.fixture
def grid(notebook: Lab) -> Any:
    """A mesh of four, shown live."""
    notebook.run(MESHES + "\nfrom monarch.actor import heal_mesh; heal_mesh(workers)")
    output = notebook.run("workers")
    notebook.cell(output, 3, "idle")
    return output


def pids(notebook: Lab) -> list[int]:
    text = notebook.read(notebook.run("print('pids', *trainers.pid.call().get().values())"), r"pids( \d+){4}")
    return [int(word) for word in text.split("pids")[-1].split()]


@pytest.mark.slow
def test_a_busy_rank_is_shown_in_a_blocked_cell_and_interrupted(notebook: Lab, grid: Any) -> None:
    notebook.start("trainers.slice(gpus=1).step.call_one(3600).get()")
    notebook.cell(grid, 1, "busy").click()
    facts = grid.locator(".mnb-facts")
    facts.get_by_text("busy with trainers.step").wait_for(timeout=10_000)
    grid.locator(".mnb-lines", has_text="one step").wait_for(timeout=10_000)
    grid.get_by_role("button", name="Stack").click()
    grid.locator(".mnb-lines", has_text="in Trainer.step").wait_for(timeout=10_000)
    assert "[*]" in notebook.prompt().inner_text()  # all of this while the cell waits
    grid.locator(".mnb-slice code", has_text=re.compile(r"^workers\.slice\(gpus=1\)$")).wait_for(timeout=10_000)
    grid.get_by_role("button", name="Interrupt").click()
    notebook.idle()
    notebook.cell(grid, 1, "idle")
    notebook.shown.locator(".jp-Notebook .jp-Cell").last.filter(has_text="KeyboardInterrupt").wait_for(timeout=10_000)
    assert notebook.errors == []


def test_a_killed_rank_turns_red_and_the_button_heals_it(notebook: Lab, grid: Any) -> None:
    pid = pids(notebook)[2]
    sighting = Sighting(notebook.shown, {"mesh": rank(2, "failed")})
    began = time.time()
    os.kill(pid, signal.SIGKILL)
    print(timing("killed to red", sighting.after(began)))
    notebook.cell(grid, 2, "failed")
    grid.locator(".mnb-legend", has_text="1 failed").wait_for(timeout=10_000)
    failures = notebook.run("%failures")
    newest = failures.locator(".mnb-failure").first
    newest.get_by_text("trainers, gpus=2 died: killed by signal 9 (SIGKILL)").wait_for()
    assert newest.get_attribute("data-end") == "open"
    grid.get_by_role("button", name="Heal").first.click()
    notebook.cell(grid, 2, "idle")
    failures.locator('.mnb-failure[data-end="healed"]').first.wait_for(timeout=10_000)
    assert notebook.errors == []


@pytest.mark.slow
def test_several_ranks_are_selected_by_keys_and_give_a_slice(notebook: Lab, grid: Any) -> None:
    grid.locator('.mnb-cell[data-index="0"]').focus()
    for key in ("ArrowRight", "Enter", "Shift+ArrowRight"):
        notebook.shown.keyboard.press(key)
    grid.locator(".mnb-slice code", has_text="workers.slice(gpus=slice(1, 3))").wait_for(timeout=5_000)
    notebook.shown.keyboard.press("Escape")
    grid.locator(".mnb-details").wait_for(state="hidden")


@pytest.mark.slow
def test_curves_and_lines_are_shown_as_they_come(notebook: Lab, grid: Any) -> None:
    curves = notebook.run("trainers.metrics")
    curves.get_by_text("no metrics yet").wait_for(timeout=10_000)
    lines = notebook.run("%logs trainers")
    notebook.run("trainers.curve.call().get(); trainers.step.call(0.1).get()")
    curves.locator('.mnb-chart[aria-label*="loss: step 19"]').wait_for(timeout=10_000)
    lines.locator(".mnb-line", has_text="gpus=3").filter(has_text="one step").first.wait_for(timeout=10_000)
    lines.get_by_label("filter text").fill("nothing like it")
    lines.locator(".mnb-line").first.wait_for(state="detached", timeout=10_000)
    assert notebook.errors == []


@pytest.mark.slow
def test_a_failed_cell_has_a_bar_that_heals_and_reruns_it(notebook: Lab, grid: Any) -> None:
    notebook.run("tries = []")
    output = notebook.run(
        """
tries.append(1)
if len(tries) == 1:
    trainers.slice(gpus=0).die.call_one().get()
print("went through", len(tries))
"""
    )
    bar = output.locator(".mnb-failure")
    bar.get_by_text("trainers, gpus=0 died: killed by signal 9 (SIGKILL)").wait_for(timeout=10_000)
    assert bar.locator(".mnb-failure-details").is_hidden()  # the error below says it
    bar.locator(".mnb-toggle").click()
    bar.locator(".mnb-facts", has_text="raised by the waiting call").wait_for(timeout=5_000)
    bar.get_by_role("button", name="Retry").click()
    notebook.shown.get_by_role("button", name="Run Once").click(
        timeout=20_000
    )  # JupyterLab asks: the file is not trusted
    output.get_by_text("went through 2").wait_for(timeout=20_000)
    notebook.idle()
    notebook.cell(grid, 0, "idle")
    assert notebook.errors == []


PLACEMENT = """
from IPython.display import HTML, display
from monarch_kernel.display.placement import placement_html
from monarch_nb.tensor.placement import Replicate, Shard, place
placed = place((1024, 1024), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Replicate()])
display(HTML(placement_html(placed, "t")))
placed
"""


@pytest.mark.slow
def test_pointing_at_a_shard_highlights_its_ranks_and_vice_versa(notebook: Lab) -> None:
    output = notebook.run(PLACEMENT)
    live = output.locator(".mnb-placement")
    live.wait_for(timeout=10_000)
    tensor, mesh = (live.locator("svg").nth(index) for index in range(2))

    def lit(selector: str) -> list[int]:
        shards = mesh.locator(selector)
        return [int(shard.get_attribute("data-at")) for shard in shards.all()]

    tensor.locator('[data-at="1"]').hover()
    assert lit(".mnb-lit") == [2, 3]
    mesh.locator('[data-at="7"]').click()
    live.locator(".mnb-description", has_text="rank 7 (data=3 model=1) · 1.00 MB · holds [768:1024, :]").wait_for(
        timeout=5_000
    )
    notebook.shown.mouse.move(0, 0)
    assert lit('[aria-pressed="true"]') == [7]
    assert lit(".mnb-lit") == [6, 7]  # the clicked rank stays lit, with all that hold the same shard
    still = output.locator(".mnb-p svg")  # by style sheets alone, as in a saved notebook
    still.first.locator(".b1").hover()
    ranks = "[...document.querySelectorAll('.mnb-p svg:nth-child(2) .x')]"
    bright = f"{ranks}.map(rank => getComputedStyle(rank).opacity > 0.9 ? 1 : 0).join('')"
    notebook.shown.wait_for_function(f"{bright} === '00110000'")
    assert notebook.errors == []


SHARDED = """
import torch
import monarch
from monarch.distributed import Mesh
pair = Mesh(shape=(2,), mesh_dim_names=("data",), name="pair")
halves = monarch.distribute(torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), pair, ["data", None])
halves
"""


@pytest.mark.slow
def test_a_button_of_a_tensor_view_shows_its_values(notebook: Lab) -> None:
    output = notebook.start(SHARDED)
    output.get_by_role("button", name="show values").click(timeout=90_000)  # PyTorch is imported first
    elements = output.get_by_role("table", name="elements")
    elements.wait_for(timeout=20_000)
    assert elements.inner_text().split() == ["1", "2", "3", "nan"]
    assert elements.locator(".mnb-odd").all_inner_texts() == ["nan"]
    by_rank = output.get_by_role("table", name="values by rank").inner_text()
    head, *rows = (row.split("\t") for row in by_rank.split("\n"))
    assert [dict(zip(head, row, strict=True))["NaN"] for row in rows] == ["0", "1"]
    notebook.run("with torch.no_grad():\n    halves.fill_(7.0);")
    output.get_by_role("button", name="show again").click()
    elements.filter(has_text=re.compile(r"^\s*7\s*7\s*7\s*7\s*$")).wait_for(timeout=20_000)
    output.get_by_role("button", name="hide").click()
    elements.wait_for(state="detached", timeout=10_000)
    notebook.run("pair.stop()")
    assert notebook.errors == []


@pytest.mark.slow
def test_the_frames_of_a_failure_are_looked_into_with_a_click(notebook: Lab, grid: Any) -> None:
    output = notebook.run("trainers.slice(gpus=2).divide.broadcast(0)")
    failure = output.locator(".mnb-failure")
    failure.get_by_text("ZeroDivisionError").first.wait_for(timeout=10_000)
    failure.locator(".mnb-trace", has_text="return 1 / number").wait_for(timeout=5_000)
    failure.get_by_role("button", name="Post-mortem").click()
    frames = failure.locator(".mnb-frames")
    frames.filter(has_text="number = 0").wait_for(timeout=10_000)
    command = failure.get_by_label("command of the debugger")
    command.fill("number + 41")
    command.press("Enter")
    frames.filter(has_text="41").wait_for(timeout=10_000)
    assert notebook.errors == []


@pytest.mark.slow
def test_what_a_call_raised_has_a_bar_that_opens_the_frames(notebook: Lab, grid: Any) -> None:
    output = notebook.run("trainers.slice(gpus=slice(1, 3)).divide.call(0).get()")
    bar = output.locator(".mnb-failure")
    bar.get_by_text("trainers.divide failed on 2 of 2 ranks: gpus=1-2; the same error").wait_for(timeout=10_000)
    bar.get_by_role("button", name="Post-mortem").click()
    bar.locator(".mnb-frames", has_text="number = 0").wait_for(timeout=10_000)
    assert notebook.errors == []


@pytest.mark.slow
def test_large_meshes_are_shown_by_host_and_open_on_click(notebook: Lab) -> None:
    from playwright.sync_api import expect

    output = notebook.run(LARGE)
    expect(output.locator(".mnb-cell")).to_have_count(300, timeout=20_000)  # a widget is drawn after its cell is done
    output.locator('.mnb-cell[data-index="7"]').hover()
    output.locator(".mnb-tip", has_text="node7").filter(has_text="1 failed, 7 idle").wait_for(timeout=5_000)
    output.locator('.mnb-cell[data-index="7"]').click()
    inner = output.locator(".mnb-inner")
    expect(inner.locator(".mnb-cell")).to_have_count(8, timeout=10_000)
    expect(output.locator(".mnb-side .mnb-slice code")).to_have_text("fleet.slice(hosts=7)", timeout=10_000)
    inner.locator('.mnb-cell[data-state="failed"]').click()
    output.locator(".mnb-slice code", has_text="fleet.slice(hosts=7, gpus=3)").wait_for(timeout=5_000)
    assert notebook.errors == []


@pytest.mark.slow
def test_what_was_run_without_a_page_is_shown_as_it_was(desk: Desk, executed: "NotebookNode") -> None:
    import nbformat
    from nbformat.sign import NotebookNotary

    root = desk.served.root
    with desk.empty("saved") as shown:
        errors = Lab(shown).errors
        for name in ("untrusted.ipynb", "trusted.ipynb"):
            nbformat.write(executed, root / name)
            if name == "trusted.ipynb":  # the signature is of what is in it, and the other's contents are the same
                NotebookNotary(data_dir=str(root.parent / "data")).sign(nbformat.read(root / name, 4))
            shown.evaluate(
                "path => void window.jupyterapp.commands.execute('docmanager:open', {path, kernelPreference: "
                "{shouldStart: false, canStart: true, autoStartDefault: false}})",
                name,
            )
            view = shown.locator(".jp-NotebookPanel")
            for text in ("trainers, gpus=2 died: killed by signal 9 (SIGKILL)", "1 failed", "one step", "loss"):
                view.get_by_text(text).first.wait_for(timeout=30_000)
            assert view.get_by_role("button", name="Heal").filter(visible=True).count() == 0  # nobody is there to do it
            assert shown.evaluate("() => !window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel")
            shown.evaluate(CLEAR)
            view.wait_for(state="detached", timeout=10_000)
        assert set(errors) <= {"Cannot read properties of null (reading 'kernel')"}  # Lab's own, of panels without one


@pytest.mark.slow
def test_after_the_page_is_loaded_again_everything_is_there_and_lives(notebook: Lab, grid: Any, tmp_path: Path) -> None:
    shown = notebook.shown
    shown.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    shown.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=15_000)
    shown.reload()
    shown.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
    shown.wait_for_function(ALL_CELLS, timeout=60_000)
    cells = shown.locator(".jp-Notebook .jp-Cell")
    again = cells.nth(cells.count() - 1).locator(".jp-Cell-outputArea")
    notebook.cell(again, 3, "idle")
    go = tmp_path / "go"
    notebook.start(f"trainers.slice(gpus=3).until.call_one({str(go)!r}).get()")
    notebook.cell(again, 3, "busy")
    go.touch()
    notebook.idle()
    notebook.cell(again, 3, "idle")
