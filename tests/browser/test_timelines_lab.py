"""Timelines in a real JupyterLab: live in a cell and in the panel, by mouse and by keys, in all themes."""

import re
from collections.abc import Iterator

import pytest

from tests.browser.lab import SCREENSHOTS, Desk, Lab, capture, panel_built, theme, write_notebook
from tests.browser.test_panel import ACTORS, Panel
from tests.browser.test_panel_actions import AXE, CHECK, MESH, RULES, UNFOLD, WIDEST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CALLS = """
for _ in range(3):
    trainers.step.call(0.3).get()
trainers.slice(gpus=2).step.call_one(1.0).get()
"""


@pytest.fixture(scope="module")
def panel(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """A notebook with four actors on four processes."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("timelines") / "timelines.ipynb", ["x = 1"])
    with desk.open(path) as shown:
        opened = Panel(Lab(shown))
        opened.lab.run(MESH)
        opened.lab.run(ACTORS + 'trainers = workers.spawn("trainers", Trainer)\ntrainers.pid.call().get()')
        opened.open()
        opened.row("gpus=3", "idle")
        yield opened


def test_a_timeline_grows_in_its_cell_and_tells_both_ends(panel: Panel) -> None:
    view = panel.lab.run("%timeline trainers").locator(".mnb-tl-view")
    panel.lab.run(CALLS)
    view.get_by_text("2 groups").wait_for(timeout=20_000)
    view.get_by_role("button", name="Stop").click()
    view.locator(".mnb-message", has_text="the timeline of trainers is complete").wait_for(timeout=10_000)
    picture = view.locator(".mnb-tl-picture")
    picture.focus()
    keys = panel.shown.keyboard
    keys.press("ArrowDown")
    message = view.locator(".mnb-message", has_text="trainers.step · Cell In[")
    message.wait_for(timeout=10_000)
    assert re.search(r"4 ranks · sent at .*answered after .*ranks began .*ran ", message.inner_text())
    assert view.locator(".b.mnb-on").count() >= 2  # of the sender, and of a row of ranks
    capture(panel.shown, SCREENSHOTS / "timeline-cell.png")
    keys.press("+")
    view.get_by_text(re.compile(r"shown \d")).wait_for(timeout=10_000)
    keys.press("0")
    view.get_by_text(re.compile(r"shown \d")).wait_for(state="detached", timeout=10_000)
    assert panel.lab.errors == []


def test_a_range_that_is_dragged_over_is_zoomed_into(panel: Panel) -> None:
    view = panel.lab.run("%timeline").locator(".mnb-tl-view")
    view.locator(".mnb-tl-picture svg").wait_for(timeout=10_000)
    picture = view.locator(".mnb-tl-picture")  # stays, while drawings in it are replaced
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    assert box is not None
    mouse = panel.shown.mouse
    mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50, steps=4)
    mouse.up()
    view.get_by_text(re.compile(r"shown \d")).wait_for(timeout=10_000)
    view.get_by_role("button", name="show all of it").click()
    view.get_by_text(re.compile(r"shown \d")).wait_for(state="detached", timeout=10_000)


def test_the_panel_records_what_is_selected(panel: Panel) -> None:
    panel.row("gpus=1").click()
    panel.command("monarch-nb:timeline")
    section = panel.node.locator("#mnb-section-timeline")
    section.get_by_text("Timeline of workers").wait_for(timeout=20_000)
    panel.lab.run(CALLS)
    section.locator(".b", has_text="step").first.wait_for(timeout=20_000)
    section.locator("input[type=search]").fill("nosuch")
    section.get_by_text("no match in what is shown").wait_for(timeout=10_000)
    section.locator("input[type=search]").fill("")
    section.get_by_role("button", name="Stop").click()


def test_a_peak_of_the_history_opens_the_timeline_there(panel: Panel) -> None:
    panel.lab.run("recorded = %timeline workers\nsum(range(30_000_000))\ntime.sleep(3)")
    view = panel.lab.run("%history workers").locator(".mnb-history")
    view.locator(".mnb-figure", has_text="memory, MB").locator("canvas").wait_for(timeout=20_000)
    panel.shown.evaluate(UNFOLD)
    section = panel.node.locator("#mnb-section-history")
    section.locator(".mnb-figure", has_text="CPU, cores").wait_for(timeout=20_000)
    view.locator(".mnb-peak").first.click()
    text = re.compile("Timeline of (workers|trainers)|no timeline was recorded at")  # the peak may be an earlier test's
    view.get_by_text(text).first.wait_for(timeout=10_000)
    capture(panel.shown, SCREENSHOTS / "history-cell.png")
    assert panel.lab.errors == []


@pytest.mark.parametrize("name", ["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"])
def test_axe_finds_no_violations_in_timelines(panel: Panel, name: str) -> None:
    if not AXE.exists():
        pytest.skip("SKIPPED test with axe-core: labextension/node_modules is not there; `make setup` installs it")
    theme(panel.shown, name)
    panel.lab.run("%timeline").locator(".mnb-tl-view svg").wait_for(timeout=20_000)
    panel.node.locator("#mnb-section-timeline svg").wait_for(timeout=20_000)
    panel.shown.screenshot(path=SCREENSHOTS / f"timeline-{name.replace(' ', '-').lower()}.png")
    panel.shown.evaluate(AXE.read_text())
    assert panel.shown.evaluate(CHECK, [[".mnb-tl-view", ".mnb-history", "#mnb-section-timeline"], RULES]) == []
    theme(panel.shown, "JupyterLab Light")


def test_the_section_fits_a_narrow_page(panel: Panel) -> None:
    before = panel.shown.viewport_size
    panel.shown.set_viewport_size({"width": 320, "height": 800})
    panel.shown.wait_for_function("() => document.querySelector('.mnb-panel').clientWidth <= 320")
    panel.shown.wait_for_function(
        "() => document.querySelector('#mnb-section-timeline svg').getAttribute('width') <= 320", timeout=10_000
    )
    panel.shown.screenshot(path=SCREENSHOTS / "timeline-narrow.png")
    assert panel.shown.evaluate(WIDEST) == []
    panel.shown.set_viewport_size(before)
