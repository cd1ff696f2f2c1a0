"""JupyterLab's own debugger on ranks: a click in the gutter, a stop in a remote actor, another rank, and on."""

from collections.abc import Iterator

import pytest

from tests.browser.lab import SCREENSHOTS, Desk, Lab, panel_built, theme, write_notebook

pytestmark = [
    pytest.mark.slow,  # eleven seconds of a processor; tests/notebook/test_dap.py has the same without a browser
    pytest.mark.timeout(240),
    # The browser's driver leaves its own odds and ends to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

TRAINER = """
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, x):
        rank = current_rank().rank
        loss = x + rank / 2
        total = self.learn(loss)
        return total

    def learn(self, loss):
        return loss * 2
"""
BEGIN = "%load_ext monarch"
MESH = """
%mesh workers hosts=2 gpus=4
trainers = workers.spawn("trainers", Trainer)
trainers.initialized.get()
"""
CALL = "sorted(trainers.step.call(10).get().values())"


@pytest.fixture(scope="module")
def notebook(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    panel_built()
    made = write_notebook(tmp_path_factory.mktemp("lab_debugger") / "lab_debugger.ipynb", ["# on two hosts"])
    with desk.open(made) as shown:
        shown.set_viewport_size({"width": 1600, "height": 1000})
        opened = Lab(shown)
        opened.run(f"import os\nos.environ['MONARCH_NB_PRELOAD'] = ''  # nothing here needs torch\n{BEGIN}")
        opened.run(TRAINER)
        opened.run(MESH)
        yield opened
        opened.run("%stop --all")
        shown.set_viewport_size({"width": 1280, "height": 1000})


def bug(notebook: Lab) -> None:
    notebook.shown.locator(".jp-DebuggerBugButton").click()


def click_gutter(notebook: Lab, text: str) -> None:
    """The gutter beside the line of the actor's cell that reads so."""
    cell = notebook.shown.locator(".jp-Notebook .jp-Cell", has_text="class Trainer")
    lines = [line.strip() for line in cell.locator(".cm-line").all_inner_texts()]
    box = cell.locator(".cm-line").nth(lines.index(text)).bounding_box()
    gutter = cell.locator(".cm-gutter.cm-breakpoint-gutter").bounding_box()
    notebook.shown.mouse.click(gutter["x"] + gutter["width"] / 2, box["y"] + box["height"] / 2)


def test_a_breakpoint_clicked_in_a_cells_gutter_stops_remote_actors_and_the_bug_button_lets_them_go(
    notebook: Lab,
) -> None:
    shown = notebook.shown
    bug(notebook)
    click_gutter(notebook, "loss = x + rank / 2")
    shown.locator(".jp-DebuggerBreakpoint").wait_for(timeout=20_000)
    output = notebook.start(CALL)
    frame = shown.locator(".jp-DebuggerCallstackFrame", has_text="Trainer.step")
    frame.wait_for(timeout=20_000)
    shown.locator(".jp-DebuggerEditor-highlight").wait_for(timeout=10_000)
    shows(notebook, "rank", "0")
    assert "[*]" in notebook.prompt().inner_text(), "all of that while the cell waits"

    ranks = shown.locator("#mnb-dap-ranks")
    ranks.get_by_role("button", name="trainers hosts=1 gpus=2").click(timeout=20_000)
    shows(notebook, "rank", "6")
    picture(notebook, "lab_debugger_light")
    theme(shown, "JupyterLab Dark")
    picture(notebook, "lab_debugger_dark")
    theme(shown, "JupyterLab Light")

    shown.evaluate("() => void window.jupyterapp.commands.execute('debugger:next')")
    shows(notebook, "loss", "13")
    evaluate(notebook, "loss = 100")
    shown.evaluate("() => void window.jupyterapp.commands.execute('debugger:next')")
    shows(notebook, "loss", "100")

    log = ranks.get_by_label("log of")
    ranks.locator("summary").first.click()
    log.fill("loss of {rank}: {x:.1f}")
    log.press("Enter")
    shown.evaluate("() => void window.jupyterapp.commands.execute('debugger:continue')")
    notebook.idle()
    assert "200" in notebook.said(output, "200")

    printed = notebook.run(CALL)
    assert "loss of 7: 10.0" in notebook.said(printed, "loss of 7"), "a logpoint prints and does not stop"

    log.fill("")
    log.press("Enter")
    output = notebook.start(CALL)
    frame.wait_for(timeout=20_000)
    bug(notebook)
    notebook.idle()
    assert "27" in notebook.said(output, "27")
    frame.wait_for(state="detached", timeout=10_000)
    assert notebook.errors == []


def shows(notebook: Lab, name: str, value: str) -> None:
    """Waits until JupyterLab's list of variables has a value beside a name."""
    notebook.shown.wait_for_function(
        """([name, value]) => [...document.querySelectorAll("#jp-debugger-sidebar .jp-DebuggerVariables-name")].some(
            each => each.textContent === name && each.nextElementSibling?.textContent === value)""",
        arg=[name, value],
        timeout=10_000,
    )


def evaluate(notebook: Lab, code: str) -> None:
    """As the page's own requests come: on the control channel, while the cell waits."""
    notebook.shown.evaluate(
        """async expression => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            const asked = {expression, context: "repl"};
            await kernel.requestDebug({type: "request", seq: 9999, command: "evaluate", arguments: asked}).done;
        }""",
        code,
    )


def picture(notebook: Lab, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    notebook.shown.screenshot(path=SCREENSHOTS / f"{name}.png")
