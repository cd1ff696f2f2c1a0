"""Acting in the panel of a real JupyterLab: by keys, menu, palette and buttons, and by the code of each action."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import ROOT, SCREENSHOTS, Desk, Lab, menu, panel_built, theme, write_notebook
from tests.browser.test_panel import ACTORS, Panel
from tests.effort import daily

pytestmark = pytest.mark.timeout(240)

MESH = """
import os
os.environ['MONARCH_NB_PRELOAD'] = ''  # nothing here needs torch
%load_ext monarch
%mesh workers gpus=4
"""


@pytest.fixture(scope="module")
def panel(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """A notebook with four actors on four processes."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("actions") / "actions.ipynb", ["x = 1"])
    with desk.open(path) as shown:
        opened = Panel(Lab(shown))
        opened.lab.run(MESH)
        opened.lab.run(ACTORS + 'trainers = workers.spawn("trainers", Trainer)\ntrainers.pid.call().get()')
        opened.open()
        opened.row("gpus=3", "idle")
        yield opened


def outcome(panel: Panel, text: str) -> None:
    panel.node.locator(".mnb-panel-outcome", has_text=text).wait_for(timeout=20_000)


def in_cell(panel: Panel, code: str) -> None:
    """Waits until the active cell has this code."""
    source = "window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
    panel.shown.wait_for_function(f"code => {source} === code", arg=code, timeout=10_000)


def agree(panel: Panel, button: str) -> None:
    """Confirms the loss, by keys."""
    dialog = panel.shown.locator(".jp-Dialog")
    dialog.get_by_role("button", name=button, exact=True).focus()
    panel.shown.keyboard.press("Enter")


LEAVE = """
from monarch.actor import this_host
away = this_host().spawn_procs(per_host={"gpus": 1}, name="away")
away.initialized.get()
away.detach(lease="5m")
"""


# First: the page of the others would be closed.
@pytest.mark.slow
def test_what_was_left_is_seen_where_a_kernel_has_no_mesh(desk: Desk, tmp_path: Path) -> None:
    panel_built()
    with desk.open(write_notebook(tmp_path / "fresh.ipynb", ["x = 1"])) as shown:
        opened = Panel(Lab(shown))
        opened.lab.run(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {LEAVE!r}], check=True)")
        opened.lab.run("%load_ext monarch")
        opened.open()
        opened.note("No processes yet")
        section = opened.node.locator("#mnb-section-left")
        section.get_by_role("button", name="Stop away").wait_for(timeout=20_000)
        section.get_by_role("button", name="Stop away").click(timeout=20_000)
        shown.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
        section.get_by_text("no mesh was left").wait_for(timeout=20_000)


def test_a_rank_is_killed_and_healed_by_keys_alone(panel: Panel) -> None:
    keys = panel.shown.keyboard
    panel.node.locator(".mnb-outline").focus()
    keys.press("End")
    keys.press("k")
    assert "what they hold are lost" in panel.shown.locator(".jp-Dialog").inner_text()
    agree(panel, "Kill")
    outcome(panel, "killed 1 proc of workers")
    panel.row("gpus=3", "failed")
    panel.node.locator(".mnb-panel-foot code", has_text="%kill workers gpus=3").wait_for(timeout=10_000)
    panel.node.locator(".mnb-outline").focus()
    keys.press("h")
    outcome(panel, "healed 1 proc of workers")
    panel.row("gpus=3", "idle")
    keys.press("Shift+H")  # also where there is nothing to heal now
    in_cell(panel, "%heal workers gpus=3")
    assert panel.lab.errors == []


def test_the_menu_key_offers_what_can_be_done_and_its_code(panel: Panel) -> None:
    panel.row("gpus=1").click(button="right")
    items = panel.shown.locator(".lm-Menu-content")
    items.get_by_text("Kill and Heal", exact=True).wait_for(timeout=10_000)
    assert items.get_by_text("Interrupt", exact=True).count() == 0  # nothing runs
    items.get_by_text("Insert Code", exact=True).hover()
    panel.shown.locator(".lm-Menu-itemLabel", has_text="%stacks workers gpus=1").click()
    panel.lab.shown.wait_for_function("() => !document.querySelector('.lm-Menu')")
    in_cell(panel, "%stacks workers gpus=1")


def test_each_action_shows_the_cell_that_does_the_same(panel: Panel) -> None:
    panel.row("trainers").click()
    panel.button("Code").click()
    codes = panel.node.locator(".mnb-codes")
    codes.get_by_text("%kill trainers", exact=True).wait_for(timeout=10_000)
    codes.get_by_text("%logs trainers", exact=True).click()
    outcome(panel, "is in a cell")
    in_cell(panel, "%logs trainers")
    panel.button("Code").click()
    codes.wait_for(state="hidden")


def test_the_active_cell_is_run_on_what_is_selected(panel: Panel) -> None:
    panel.lab.run("1 + 1")
    panel.row("gpus=2").click()
    panel.command("monarch-nb:run")
    outcome(panel, "the cell runs on workers gpus=2")
    panel.shown.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.some("
        "cell => cell.model.sharedModel.getSource() === '%%on workers gpus=2\\n1 + 1')"
    )
    panel.shown.locator(".jp-Notebook .jp-OutputArea-output", has_text=re.compile(r"ValueMesh.*2")).last.wait_for()


def test_a_breakpoint_is_set_where_a_person_says(panel: Panel) -> None:
    panel.row("trainers").click()
    panel.command("monarch-nb:break", palette=True)
    field = panel.shown.locator(".jp-Dialog input")
    assert field.input_value() == "Trainer."
    field.fill("Trainer.step if seconds > 60")
    panel.shown.keyboard.press("Enter")
    outcome(panel, "at Trainer.step if seconds > 60 on trainers")
    panel.node.locator(".mnb-panel-foot code", has_text="%break Trainer.step if seconds > 60 on trainers").wait_for()
    assert "Trainer.step" in panel.lab.run("%break").inner_text()
    panel.lab.run("%break clear")


# A user in another window, and a desktop that records its notifications.
ELSEWHERE = """() => {
    window.mnbShown = [];
    window.mnbLooks = document.hasFocus.bind(document);
    document.hasFocus = () => false;
    const recorder = class { constructor(title, options) { window.mnbShown.push([title, options.body]); } };
    recorder.permission = "default";
    recorder.requestPermission = async () => (recorder.permission = "granted");
    window.Notification = recorder;
}"""
BACK = """() => {
    document.hasFocus = window.mnbLooks;
    window.dispatchEvent(new Event("focus"));
}"""


def test_the_end_of_a_long_cell_reaches_who_looks_elsewhere(panel: Panel) -> None:
    shown = panel.shown
    shown.evaluate(ELSEWHERE)
    before = shown.title()
    panel.lab.run("import time\n%notify 500ms")
    shown.get_by_role("button", name="Allow notifications").click()
    shown.wait_for_function("() => window.Notification.permission === 'granted'")
    panel.lab.run("time.sleep(1); 1 / 0")
    status = shown.locator(".mnb-status-item", has_text=re.compile(r"actions\.ipynb: In\[\d+\] failed after \d"))
    status.wait_for(timeout=10_000)
    assert re.match(r"✕ actions\.ipynb: In\[\d+\] failed after", shown.title())
    ((title, body),) = shown.evaluate("window.mnbShown")
    assert "failed after" in title
    assert body == "ZeroDivisionError: division by zero"
    shown.evaluate(BACK)
    assert shown.title() == before
    status.get_by_role("button").click()  # read: the cluster again
    shown.locator(".mnb-status-item", has_text="2 meshes · 4/4 ranks").wait_for(timeout=10_000)
    panel.lab.run("%notify off")


def test_a_cell_is_sent_to_ranks_and_back_in_its_toolbar(panel: Panel) -> None:
    panel.lab.run("x = 40 + 2; x")
    choice = panel.shown.locator(".jp-Notebook .jp-Cell.jp-mod-active .mnb-on-cell select")
    choice.select_option("workers")
    in_cell(panel, "%%on workers\nx = 40 + 2; x")
    panel.command("monarch-nb:where")
    field = panel.shown.locator(".jp-Dialog input")
    field.fill("workers gpus=1")
    panel.shown.keyboard.press("Enter")
    in_cell(panel, "%%on workers gpus=1\nx = 40 + 2; x")
    assert choice.input_value() == "workers gpus=1"
    metadata = "window.jupyterapp.shell.currentWidget.content.activeCell.model.getMetadata('monarch')"
    assert panel.shown.evaluate(metadata) == {"on": "workers gpus=1"}
    panel.command("notebook:run-cell")
    panel.shown.locator(".jp-mod-active .jp-OutputArea-output", has_text=re.compile(r"ValueMesh.*42")).wait_for()
    choice.select_option("kernel")
    in_cell(panel, "x = 40 + 2; x")
    assert "workers gpus=1" in choice.inner_text()  # to go back to
    assert panel.lab.errors == []


AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
CHECK = """async ([selectors, rules, without = []]) => {
    const include = selectors.filter(selector => document.querySelector(selector)).map(selector => [selector]);
    const {violations} = await axe.run({include, exclude: without.map(selector => [selector])}, {runOnly: rules});
    return violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html.slice(0, 200)}`));
}"""
# Sections that are closed.
UNFOLD = """() => {
    for (const title of document.querySelectorAll(".mnb-panel .jp-AccordionPanel-title:not(.lm-mod-expanded)"))
        title.click();
}"""
WIDEST = """() => [...document.querySelectorAll(".mnb-panel, .mnb-panel .mnb-section > .mnb-v")]
    .filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.parentElement.id || node.className)"""


def unfold(panel: Panel) -> None:
    panel.shown.evaluate(UNFOLD)
    panel.node.locator("#mnb-section-left", has_text="no mesh was left").wait_for(timeout=10_000)


@pytest.mark.parametrize("name", daily(["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"], 1))
def test_axe_finds_no_violations_in_the_panel_of_any_theme(panel: Panel, name: str) -> None:
    if not AXE.exists():
        pytest.skip("SKIPPED test with axe-core: labextension/node_modules is not there; `make setup` installs it")
    unfold(panel)
    panel.lab.run("%kill workers gpus=2")
    panel.row("gpus=2", "failed").click()
    if panel.node.locator(".mnb-codes").is_hidden():
        panel.button("Code").click()
    theme(panel.shown, name)
    panel.shown.evaluate(AXE.read_text())
    parts = [".mnb-panel", ".mnb-status-item", ".mnb-on-cell"]
    assert panel.shown.evaluate(CHECK, [parts, RULES]) == []
    panel.button("Spawn…").click()
    panel.shown.locator(".mnb-form").wait_for()
    assert panel.shown.evaluate(CHECK, [[".mnb-form"], RULES]) == []
    panel.shown.keyboard.press("Escape")
    panel.lab.run("%heal workers")
    theme(panel.shown, "JupyterLab Light")


@pytest.mark.slow
def test_the_panel_fits_a_narrow_page_and_remembers_its_sections(panel: Panel) -> None:
    unfold(panel)
    before = panel.shown.viewport_size
    panel.shown.set_viewport_size({"width": 320, "height": 800})
    panel.shown.wait_for_function("() => document.querySelector('.mnb-panel').clientWidth <= 320")
    assert panel.shown.evaluate(WIDEST) == []
    panel.shown.set_viewport_size(before)
    sections = panel.shown.evaluate("JSON.parse(localStorage.getItem('monarch-nb:sections'))")
    assert {"mnb-section-meshes", "mnb-section-left", "mnb-section-transfers"} <= set(sections)
    panel.command("docmanager:save")
    panel.shown.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=15_000)
    panel.shown.reload()
    panel.shown.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    panel.open()
    panel.node.locator("#mnb-section-left", has_text="no mesh was left").wait_for(timeout=20_000)


@pytest.mark.slow
def test_a_card_of_the_launcher_starts_a_notebook_with_a_mesh(desk: Desk) -> None:
    panel_built()
    with desk.empty("launched") as shown:
        try:
            shown.locator(".jp-LauncherCard", has_text="Notebook with a Mesh").click()
            form = shown.locator(".mnb-form")
            form.wait_for(timeout=60_000)
            form.get_by_label("name").fill("grid")
            form.get_by_label("shape").fill("hosts=2 gpus=1")
            form.get_by_label("set-up").fill("x = 1")
            assert form.locator("pre").inner_text() == "%%mesh grid hosts=2 gpus=1\nx = 1"
            assert "2 processes on 2 hosts" in form.inner_text()
            shown.screenshot(path=SCREENSHOTS / "spawn.png")
            shown.get_by_role("button", name="Spawn", exact=True).click()
            opened = Panel(Lab(shown))
            opened.row("grid")
            opened.summary("1 mesh · 2/2 ranks")
            sources = (
                "[...window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells].map(c => c.getSource())"
            )
            assert shown.evaluate(sources)[:2] == ["%load_ext monarch", "%%mesh grid hosts=2 gpus=1\nx = 1"]
        finally:
            shown.evaluate("() => window.jupyterapp.shell.currentWidget?.sessionContext?.shutdown()")


def test_the_menu_mesh_acts_on_what_is_selected(panel: Panel) -> None:
    panel.row("trainers").click()
    menu(panel.shown, "Mesh", "Logs")
    picked = panel.node.locator("#mnb-section-logs").get_by_label("mesh", exact=True).locator("option:checked")
    picked.filter(has_text="trainers").wait_for(state="attached", timeout=10_000)
