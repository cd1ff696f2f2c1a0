"""The panel in a real JupyterLab: loaded, at work while a cell blocks, healing, after reloads and restarts."""

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import KERNEL_IS_IDLE, Desk, Lab, panel_built, write_notebook
from tests.browser.seen import Sighting, row, timing

pytestmark = pytest.mark.timeout(240)

ACTORS = """
import os, time
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, seconds):
        print("one step")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.02)

    @endpoint
    def wait(self, late):
        context = current_rank().rank
        time.sleep(3600 if context == late else 0)

    @endpoint
    def pid(self):
        return os.getpid()
"""


class Panel:
    """The side panel, and the actions of a person in it."""

    def __init__(self, opened: Lab) -> None:
        self.lab = opened
        self.shown = opened.shown
        self.node = self.shown.locator(".mnb-panel")

    def open(self) -> None:
        self.command("monarch-nb:open")
        self.node.wait_for(timeout=10_000)

    def command(self, command: str, /, **arguments: Any) -> None:
        self.shown.evaluate("([id, args]) => void window.jupyterapp.commands.execute(id, args)", [command, arguments])

    def button(self, name: str) -> Any:
        return self.node.get_by_role("button", name=name, exact=True)

    def note(self, text: str) -> Any:
        note = self.node.locator(".mnb-panel-note", has_text=text)
        note.wait_for(timeout=20_000)
        return note

    def row(self, name: str, state: str = "") -> Any:
        """A row of the tree that begins with this name, once it is in a state."""
        row = f'.mnb-outline-row[data-state="{state}"]' if state else ".mnb-outline-row"
        match = self.node.locator(f'{row}:has(.mnb-outline-name:text-is("{name}"))').first
        match.wait_for(timeout=20_000)
        return match

    def summary(self, text: str) -> None:
        self.node.locator(".mnb-panel-summary", has_text=text).wait_for(timeout=20_000)

    def load(self) -> None:
        self.note("Monarch is not loaded in this notebook")
        self.button("Load Monarch").click()
        self.note("No processes yet")

    def spawn(self) -> None:
        self.button("Spawn…").click()
        dialog = self.shown.locator(".jp-Dialog")
        assert "%mesh workers gpus=4" in dialog.inner_text()
        dialog.get_by_role("button", name="Spawn").click()
        self.row("gpus=3", "idle")

    def start_active(self) -> Any:
        """Runs the active cell; gives its output area, at once."""
        active = self.shown.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex")
        self.command("notebook:run-cell")
        return self.shown.locator(".jp-Notebook .jp-Cell").nth(active).locator(".jp-Cell-outputArea")

    def source(self) -> str:
        """The code of the active cell."""
        code = "() => window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
        return str(self.shown.evaluate(code))


@pytest.fixture(scope="module")
def panel(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """A notebook with the extension loaded and four actors on four processes, all by the panel."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("panel") / "panel.ipynb", ["x = 1"])
    with desk.open(path) as shown:
        opened = Panel(Lab(shown))
        opened.lab.run("import os\nos.environ['MONARCH_NB_PRELOAD'] = ''  # nothing here needs torch")
        opened.open()
        opened.load()
        opened.spawn()
        opened.lab.run(ACTORS + 'trainers = workers.spawn("trainers", Trainer)\ntrainers.pid.call().get()')
        yield opened


def pids(panel: Panel) -> list[int]:
    printed = panel.lab.run("print('pids', *trainers.pid.call().get().values())")
    text = panel.lab.read(printed, r"pids( \d+){4}")
    return [int(word) for word in text.split("pids")[-1].split()]


@pytest.mark.slow
def test_the_code_of_a_click_can_be_inserted_into_the_notebook(panel: Panel) -> None:
    panel.command("monarch-nb:spawn", name="extra", dims={"gpus": 1})
    panel.row("extra")
    panel.node.locator(".mnb-panel-foot code", has_text="%mesh extra gpus=1").wait_for(timeout=10_000)
    panel.button("Insert code").click()
    assert panel.source() == "%mesh extra gpus=1"
    panel.row("extra").click()
    panel.button("Stop").click()
    dialog = panel.shown.locator(".jp-Dialog")
    assert "what they hold are lost" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    panel.button("Stop").click()
    panel.shown.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
    panel.node.locator(".mnb-panel-foot code", has_text="%stop extra").wait_for(timeout=10_000)
    panel.summary("2 meshes · 4/4 ranks")


def test_the_panel_shows_and_interrupts_a_busy_rank_of_a_cell(panel: Panel) -> None:
    sighting = Sighting(panel.shown, {"panel": row("gpus=1", "busy")})
    output = panel.lab.start("print('at', time.time())\ntrainers.slice(gpus=1).step.call_one(3600).get()")
    busy = panel.row("gpus=1", "busy")
    began = float(panel.lab.read(output, r"at \d+\.\d+").split()[1])
    print(timing("called to busy", sighting.after(began)))
    busy.filter(has_text="trainers.step").wait_for(timeout=10_000)
    busy.click()
    panel.button("Stack").click()
    panel.node.locator(".mnb-lines", has_text="in Trainer.step").wait_for(timeout=10_000)
    assert panel.shown.locator(".jp-InputPrompt").last.inner_text().strip() == "[*]:"  # all of this while it waits
    panel.button("Interrupt").click()
    panel.lab.idle()
    panel.row("gpus=1", "idle")
    assert panel.lab.errors == []


def test_stop_ends_the_cell_and_its_button_interrupts_the_ranks(panel: Panel) -> None:
    output = panel.lab.start("print('begun')\ntrainers.step.call(3600).get()")
    panel.row("gpus=3", "busy")
    panel.shown.locator('[data-command="notebook:interrupt-kernel"], [data-jp-item-name="interrupt"]').first.click()
    panel.lab.read(output, r"Press stop \(Ctrl-C\) again by [\d:]+ to interrupt the ranks too")
    button = output.get_by_role("button", name="Interrupt the ranks", exact=True)
    button.click()
    text = panel.lab.read(output, r"Meanwhile trainers\.step\(\) on trainers gpus=0-3 was interrupted\.")
    assert "Press stop" not in text
    assert button.count() == 0
    panel.row("gpus=3", "idle")
    panel.lab.idle()
    assert panel.lab.errors == []


UNHELD = """
from monarch.actor import this_host
from monarch.config import configure
configure(mesh_unheld_memory=0)  # however little this machine has, a click ends it
this_host().spawn_procs(per_host={"gpus": 1}, name="lost").initialized.get();
"""


def test_a_mesh_that_nothing_refers_to_is_ended_by_a_click(panel: Panel) -> None:
    panel.lab.run(UNHELD)
    line = panel.node.locator(".mnb-unheld", has_text="Nothing refers to lost any more.")
    line.wait_for(timeout=20_000)
    line.get_by_role("button", name="End it").click()
    line.wait_for(state="hidden", timeout=20_000)
    panel.summary("2 meshes · 4/4 ranks")
    assert panel.lab.errors == []


@pytest.mark.slow
def test_a_killed_process_turns_red_everywhere_and_the_panel_heals_it(panel: Panel) -> None:
    pid = pids(panel)[2]
    sighting = Sighting(panel.shown, {"panel": row("gpus=2", "failed"), "status bar": (".mnb-status-item", "1 failed")})
    began = time.time()
    os.kill(pid, signal.SIGKILL)
    print(timing("killed to red", sighting.after(began)))
    panel.row("gpus=2", "failed").click()
    panel.summary("3/4 ranks · 1 failed")
    status = panel.shown.locator(".mnb-status-item")
    line = re.compile(r"^\s*✕ 2 meshes · 3/4 ranks · 1 failed\s*$")
    status.filter(has_text=line).wait_for(timeout=10_000)
    panel.node.get_by_text("Failures · 1 not healed").wait_for(timeout=10_000)
    panel.node.locator(".mnb-facts", has_text="SIGKILL").wait_for(timeout=10_000)
    panel.button("Heal").click()
    panel.row("gpus=2", "idle")
    panel.summary("2 meshes · 4/4 ranks")
    panel.node.locator(".mnb-panel-foot", has_text="healed 1 proc of workers").wait_for(timeout=10_000)
    assert panel.lab.errors == []


@pytest.mark.slow
def test_a_button_in_static_html_heals_where_the_panel_is(panel: Panel) -> None:
    os.kill(pids(panel)[0], signal.SIGKILL)
    panel.row("gpus=0", "failed")
    panel.lab.run("from IPython.display import HTML\nfrom monarch_kernel.display.meshes import mesh_html")
    panel.lab.run("HTML(mesh_html(workers))").get_by_role("button", name="Heal workers").click()
    panel.row("gpus=0", "idle")


def test_the_tree_has_room_in_a_low_window(panel: Panel) -> None:
    before = panel.shown.viewport_size
    panel.shown.set_viewport_size({**before, "height": 800})
    try:
        box = "document.querySelector('.mnb-panel .mnb-outline').clientHeight"
        panel.shown.wait_for_function(f"() => {box} >= 7 * 24 && {box} < 250", timeout=10_000)
    finally:
        panel.shown.set_viewport_size(before)


def test_the_tree_is_worked_by_keys(panel: Panel) -> None:
    from playwright.sync_api import expect

    tree = panel.node.get_by_role("tree")
    tree.focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        panel.shown.keyboard.press(key)
    active = panel.node.locator(f"#{tree.get_attribute('aria-activedescendant')}")
    expect(active).to_have_attribute("aria-label", "trainers, idle", timeout=10_000)  # a heal may be just over
    assert active.get_attribute("aria-level") == "3"
    panel.shown.keyboard.press("ArrowLeft")
    panel.shown.keyboard.press("ArrowLeft")
    assert panel.row("gpus=0").get_attribute("aria-expanded") == "false"


@pytest.mark.slow
def test_lines_are_shown_as_they_are_written(panel: Panel) -> None:
    panel.row("trainers").click()
    panel.command("monarch-nb:logs")
    panel.lab.run("trainers.slice(gpus=3).step.call_one(0).get()")
    panel.node.locator(".mnb-line", has_text="gpus=3").filter(has_text="one step").first.wait_for(timeout=10_000)


TICKS = """
from monarch_kernel.views import LiveView, register, unregister
SCRIPT = 'export default {render({model, el}) {\\n' \
    'model.on("msg:custom", (m) => { if (m.type === "ticks") el.textContent = `tick ${m.count}`; });\\n' \
    'model.send({type: "watch", topic: "ticks", id: "t1"});}}'
def feed(watch):
    watch.publish(count=7)
    return lambda: None
register(LiveView(name="ticks", title="Ticks", script=lambda: SCRIPT, feed=feed))
"""


@pytest.mark.slow
def test_why_names_the_rank_that_blocks_a_call_and_ends_it(panel: Panel) -> None:
    cell = panel.lab.start("trainers.wait.call(2).get()")
    panel.row("gpus=2", "busy")
    cell.locator("button", has_text="Why?").click()  # in the waiting cell
    panel.node.locator("#mnb-section-findings", has_text="inspected: ").wait_for(timeout=20_000)
    panel.command("monarch-nb:why", palette=True)
    finding = panel.node.locator(".mnb-finding", has_text="gpus=2 alone has not answered trainers.wait()")
    while not finding.count():  # the panel reports it once the others have waited for three seconds
        panel.node.locator("#mnb-section-findings").get_by_role("button", name="Why?", exact=True).click()
        panel.node.locator("#mnb-section-findings", has_text="inspected: ").wait_for(timeout=20_000)
        time.sleep(0.5)
    panel.button("End these calls").click()
    panel.lab.read(cell, "CallAbortedError")
    panel.row("gpus=2", "idle")
    panel.button("Slow ranks?").click()
    panel.node.locator(".mnb-strip .mnb-phases").nth(3).wait_for(timeout=20_000)


@pytest.mark.slow
def test_a_view_registered_by_the_kernel_has_a_panel_section(panel: Panel) -> None:
    panel.lab.run(TICKS)
    panel.node.locator("#mnb-section-view-ticks", has_text="tick 7").wait_for(timeout=10_000)
    panel.lab.run("unregister('ticks')")
    panel.node.locator("#mnb-section-view-ticks").wait_for(state="detached", timeout=10_000)


@pytest.mark.slow
def test_a_page_reloaded_while_a_cell_blocks_is_complete_and_live(panel: Panel) -> None:
    shown = panel.shown
    panel.lab.start("trainers.slice(gpus=3).step.call_one(3600).get()")
    panel.row("gpus=3", "busy")
    panel.command("docmanager:save")
    shown.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=15_000)
    shown.reload()
    shown.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    panel.open()
    panel.row("gpus=3", "busy").click()
    panel.button("Interrupt").click()
    panel.row("gpus=3", "idle")
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
    panel.lab.start("trainers.slice(gpus=2).step.call_one(3600).get()")
    panel.row("gpus=2", "busy").click()
    panel.button("Interrupt").click()
    panel.row("gpus=2", "idle")
    panel.lab.idle()


@pytest.mark.slow
def test_after_a_restart_it_offers_to_load_the_extension_again(panel: Panel) -> None:
    shown = panel.shown
    panel.command("kernelmenu:restart")
    shown.get_by_role("button", name="Confirm Kernel Restart").click()
    panel.note("Monarch is not loaded in this notebook")
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=40_000)
    output = panel.lab.run("%load_ext monarch")  # in a cell this time
    panel.note("No processes yet")
    # Nor does it report earlier comms. ipykernel may, of messages of jupyter-widgets to an ended subshell.
    assert "monarch_nb.cluster" not in output.inner_text()
    assert panel.lab.errors == []


@pytest.mark.slow
def test_displays_and_the_status_bar_follow_the_end_of_a_kernel(panel: Panel) -> None:
    shown, status = panel.shown, panel.shown.locator(".mnb-status-item")
    output = panel.lab.run("%mesh left gpus=1")
    panel.lab.cell(output, 0, "idle")
    panel.lab.start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    shown.get_by_role("button", name="Ok").click(timeout=40_000)
    panel.lab.read(output, "state at")
    output.get_by_role("button", name="Actions").wait_for(state="hidden")
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=40_000)
    panel.lab.run("%load_ext monarch")
    status.filter(has_text="no meshes").wait_for(timeout=20_000)
    shown.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")
    panel.note("No notebook is open")
    status.wait_for(state="hidden")
    panel.command("docmanager:open", path="panel.ipynb")
    status.filter(has_text="no meshes").wait_for(timeout=20_000)


@pytest.mark.slow
def test_another_notebook_in_front_shows_its_own_cluster(panel: Panel) -> None:
    shown = panel.shown
    panel.button("Spawn…").wait_for()
    panel.command("notebook:create-new", kernelName="python3")
    panel.note("Monarch is not loaded in this notebook")
    panel.command("kernelmenu:shutdown")
    panel.note("No kernel")
    panel.command("docmanager:open", path="panel.ipynb")
    panel.note("No processes yet")
    shown.locator(".mnb-panel-name", has_text=re.compile(r"^\s*panel\.ipynb\s*$")).wait_for(timeout=10_000)
