"""Acting from displays in cells: on a mesh beside JupyterLab's panel, and in `%panel`, where there is none."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import SCREENSHOTS, Desk, Lab, capture, opened, panel_built, serve, theme, write_notebook
from tests.browser.test_panel import ACTORS, Panel
from tests.browser.test_panel_actions import AXE, CHECK, MESH, RULES, in_cell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TRAINERS = ACTORS + 'trainers = workers.spawn("trainers", Trainer)\ntrainers.pid.call().get();'
THEMES = ["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"]


@pytest.fixture(scope="module")
def panel(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """Four actors on four processes, in a JupyterLab with the panel."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("acting") / "acting.ipynb", ["x = 1"])
    with desk.open(path) as shown:
        yield begun(Lab(shown))


@pytest.fixture(scope="module")
def alone(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The same in a JupyterLab without the panel, with widgets alone."""
    folder = tmp_path_factory.mktemp("alone")
    path = write_notebook(folder / "alone.ipynb", ["x = 1"])
    with serve(folder / "lab", {}, panel=False) as served, opened(desk.by, served.add(path)) as shown:
        yield begun(Lab(shown)).lab


def begun(notebook: Lab) -> Panel:
    notebook.run(MESH)
    notebook.run(TRAINERS)
    return Panel(notebook)


def result(display: Any, text: str) -> None:
    """Waits until the display shows the result of an action."""
    display.locator(".mnb-message", has_text=text).wait_for(timeout=20_000)


def choose(display: Any, item: str) -> None:
    display.locator(".mnb-menu").get_by_role("menuitem", name=item, exact=True).click()


def agree(display: Any, button: str) -> None:
    dialog = display.locator(".mnb-dialog")
    assert "lost" in dialog.inner_text()
    dialog.get_by_role("button", name=button, exact=True).click()


def test_a_rank_of_a_display_is_killed_and_healed_there(panel: Panel) -> None:
    output, keys = panel.lab.run("workers"), panel.shown.keyboard
    panel.lab.cell(output, 3, "idle").click(button="right")
    choose(output, "Kill")
    agree(output, "Kill")
    result(output, "killed 1 proc of workers")
    assert output.locator(".mnb-acted code").inner_text() == "%kill workers gpus=3"
    panel.lab.cell(output, 3, "failed").focus()
    keys.press("h")
    result(output, "healed 1 proc of workers")
    panel.lab.cell(output, 3, "idle").focus()
    keys.press("Shift+K")
    in_cell(panel, "%kill workers gpus=3")
    assert panel.shown.locator(".jp-Dialog").count() == 0
    assert panel.lab.errors == []


def test_the_menu_key_opens_the_menu_of_a_rank(panel: Panel) -> None:
    output, keys = panel.lab.run("trainers"), panel.shown.keyboard
    panel.lab.cell(output, 1, "idle").focus()
    keys.press("Shift+F10")
    output.locator(".mnb-menu button:focus").wait_for(timeout=5_000)
    keys.press("l")
    result(output, "Logs of trainers gpus=1: in the panel")
    picked = panel.node.locator("#mnb-section-logs").get_by_label("mesh", exact=True).locator("option:checked")
    picked.filter(has_text="trainers").wait_for(state="attached", timeout=10_000)
    panel.lab.start("trainers.slice(gpus=1).step.call_one(3600).get()")
    panel.lab.cell(output, 1, "busy").focus()
    keys.press("ContextMenu")
    output.locator(".mnb-menu button:focus").wait_for(timeout=5_000)
    keys.press("t")  # while the cell runs
    output.locator(".mnb-answer .mnb-lines", has_text="in Trainer.step").wait_for(timeout=10_000)
    panel.lab.cell(output, 1, "busy").focus()
    keys.press("i")
    panel.lab.idle()
    panel.lab.cell(output, 1, "idle")
    assert panel.lab.errors == []


@pytest.mark.parametrize("name", THEMES)
def test_axe_finds_no_violations_in_displays_and_their_menus(panel: Panel, name: str) -> None:
    if not AXE.exists():
        pytest.skip("SKIPPED test with axe-core: labextension/node_modules is not there; `make setup` installs it")
    shown = panel.shown
    theme(shown, name)
    output = panel.lab.run("workers")
    panel.lab.cell(output, 0, "idle").click()
    shown.evaluate(AXE.read_text())
    output.locator(".mnb-details").wait_for()
    assert shown.evaluate(CHECK, [[".jp-Cell.jp-mod-active .mnb-v"], RULES]) == []
    output.get_by_role("button", name="Actions").click()
    shown.screenshot(path=SCREENSHOTS / f"acting-menu-{THEMES.index(name)}.png")
    assert shown.evaluate(CHECK, [[".mnb-menu"], RULES]) == []
    choose(output, "Stop")
    output.locator(".mnb-dialog").wait_for()
    shown.screenshot(path=SCREENSHOTS / f"acting-dialog-{THEMES.index(name)}.png")
    assert shown.evaluate(CHECK, [[".mnb-dialog"], RULES]) == []
    shown.keyboard.press("Escape")
    output.locator(".mnb-dialog").wait_for(state="detached")
    theme(shown, "JupyterLab Light")


def row(display: Any, name: str, state: str = "") -> Any:
    kind = f'.mnb-outline-row[data-state="{state}"]' if state else ".mnb-outline-row"
    row = display.locator(f'{kind}:has(.mnb-outline-name:text-is("{name}"))').first
    row.wait_for(timeout=20_000)
    return row


def test_the_panel_in_a_cell_acts_without_anything_of_jupyterlab(alone: Lab) -> None:
    display, keys = alone.run("%panel").locator(".mnb-cellpanel"), alone.shown.keyboard
    row(display, "gpus=3", "idle").click(button="right")
    choose(display, "Kill")
    agree(display, "Kill")
    result(display, "killed 1 proc of workers")
    row(display, "gpus=3", "failed")
    display.locator("summary", has_text="Failures").click()
    display.locator(".mnb-section-failures", has_text="Failures").wait_for(timeout=10_000)
    display.locator(".mnb-outline").focus()
    keys.press("h")
    result(display, "healed 1 proc of workers")
    row(display, "gpus=3", "idle")
    assert display.locator(".mnb-acted code").inner_text() == "%heal workers gpus=3"
    assert display.get_by_role("button", name="Insert code").count() == 0
    capture(alone.shown, SCREENSHOTS / "cellpanel-light.png")
    assert alone.errors == []


def test_the_panel_in_a_cell_asks_in_dialogs_of_its_own(alone: Lab) -> None:
    display, keys = alone.run("%panel").locator(".mnb-cellpanel"), alone.shown.keyboard
    row(display, "trainers").click()
    keys.press("b")
    field = display.locator(".mnb-dialog input")
    assert field.input_value() == "Trainer."
    field.fill("Trainer.step if seconds > 60")
    keys.press("Enter")
    result(display, "at Trainer.step if seconds > 60 on trainers")
    alone.run("%break clear")
    display.get_by_role("button", name="Spawn…").click()
    form = display.locator(".mnb-dialog .mnb-form")
    form.get_by_label("name").fill("extra")
    form.get_by_label("shape").fill("gpus=1")
    display.locator(".mnb-dialog").get_by_role("button", name="Spawn").click()
    result(display, "extra is running")
    row(display, "extra").click()
    keys.press("l")
    display.locator(".mnb-section-logs").get_by_label("mesh", exact=True).wait_for(timeout=10_000)
    keys.press("Escape")  # back to the tree
    keys.press("s")
    agree(display, "Stop")
    result(display, "stopped 1 proc of extra")
    display.get_by_role("button", name="Spawn…").click()
    form.get_by_label("show this cell").check()
    display.locator(".mnb-dialog").get_by_role("button", name="Spawn").click()
    result(display, "this does it, in a cell")
    assert re.fullmatch(r"%mesh \w+ gpus=\d", display.locator(".mnb-acted code").inner_text())
    assert alone.errors == []


def test_the_panel_of_a_cell_works_while_another_cell_runs(alone: Lab) -> None:
    display = alone.run("%panel").locator(".mnb-cellpanel")
    alone.start("trainers.slice(gpus=2).step.call_one(3600).get()")
    row(display, "gpus=2", "busy").click()
    display.get_by_role("button", name="Stack").click()
    display.locator(".mnb-section-selected .mnb-lines", has_text="in Trainer.step").wait_for(timeout=10_000)
    display.get_by_role("button", name="Interrupt").click()
    alone.idle()
    row(display, "gpus=2", "idle")
    assert alone.errors == []


@pytest.mark.parametrize("name", THEMES)
def test_axe_finds_no_violations_in_the_panel_of_a_cell(alone: Lab, name: str) -> None:
    if not AXE.exists():
        pytest.skip("SKIPPED test with axe-core: labextension/node_modules is not there; `make setup` installs it")
    shown = alone.shown
    theme(shown, name)
    display = alone.run("%panel").locator(".mnb-cellpanel")
    row(display, "trainers").click()
    shown.evaluate("() => document.querySelectorAll('.mnb-fold:not([open])').forEach(fold => (fold.open = true))")
    display.locator(".mnb-section-left", has_text="no mesh was left").wait_for(timeout=10_000)
    capture(shown, SCREENSHOTS / f"cellpanel-{THEMES.index(name)}.png")
    shown.evaluate(AXE.read_text())
    assert shown.evaluate(CHECK, [[".jp-Cell.jp-mod-active .mnb-cellpanel"], RULES]) == []
    display.get_by_role("button", name="Spawn…").click()
    display.locator(".mnb-form").wait_for()
    shown.screenshot(path=SCREENSHOTS / f"cellpanel-spawn-{THEMES.index(name)}.png")
    assert shown.evaluate(CHECK, [[".mnb-dialog"], RULES]) == []
    shown.keyboard.press("Escape")
    theme(shown, "JupyterLab Light")
