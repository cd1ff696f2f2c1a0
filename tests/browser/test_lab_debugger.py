"""JupyterLab's own debugger on ranks of two hosts with networks of their own: a click in the gutter, a stop in remote
actors, values read and set, steps, another rank, a logpoint, and on.
"""

from collections.abc import Iterator

import pytest

from tests.browser.lab import SCREENSHOTS, Desk, Lab, panel_built, theme, write_notebook
from tests.cluster.cables import bridged_hosts

pytestmark = [
    pytest.mark.slow,  # fifteen seconds of a processor; tests/notebook/test_dap.py has the same without a browser
    pytest.mark.timeout(240),
]

TRAINER = """
from monarch.actor import Actor, attach_hosts, current_rank, endpoint

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
hosts = attach_hosts({endpoints!r}, key={key!r})
workers = hosts.spawn_procs(per_host={{"gpus": 4}}, name="workers")
trainers = workers.spawn("trainers", Trainer)
trainers.initialized.get()
"""
CALL = "sorted(trainers.step.call(10).get().values())"

# What the page and the kernel say to each other about the debugger, and when cells begin and end.
RECORD = """() => {
    const told = window.mnbDap = [];
    const began = performance.now();
    const cells = ["execute_input", "execute_reply", "input_request"];
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    kernel.anyMessage.connect((_, { msg, direction }) => {
        const kind = msg.header.msg_type;
        if (!kind.startsWith("debug_") && !cells.includes(kind)) return;
        const { command, event, success, message, arguments: asked, body } = msg.content;
        const at = ((performance.now() - began) / 1000).toFixed(3);
        const what = success === false ? `FAILED ${message}` : JSON.stringify(body ?? asked ?? null);
        told.push(`${at} ${direction} ${kind} ${command ?? event ?? ""} ${what?.slice(0, 300)}`);
    });
}"""


@pytest.fixture(scope="module")
def notebook(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    panel_built()
    folder = tmp_path_factory.mktemp("lab_debugger")
    path = write_notebook(folder / "lab_debugger.ipynb", ["# on two hosts"])
    with bridged_hosts(folder, 2) as (key, endpoints), desk.open(path) as shown:
        shown.set_viewport_size({"width": 1600, "height": 1000})
        opened = Lab(shown)
        shown.evaluate(RECORD)
        opened.run(f"import os\nos.environ['MONARCH_NB_PRELOAD'] = ''  # nothing here needs torch\n{BEGIN}")
        opened.run(TRAINER)
        opened.run(MESH.format(endpoints=endpoints, key=str(key)))
        yield opened
        print("\n".join(shown.evaluate("window.mnbDap")))
        opened.run("%stop --all")
        shown.set_viewport_size({"width": 1280, "height": 1000})


def bug(notebook: Lab) -> None:
    notebook.shown.locator(".jp-DebuggerBugButton").click()


def click_gutter(notebook: Lab, text: str) -> None:
    """The gutter beside the line of the actor's cell with this text."""
    cell = notebook.shown.locator(".jp-Notebook .jp-Cell", has_text="class Trainer")
    lines = [line.strip() for line in cell.locator(".cm-line").all_inner_texts()]
    box = cell.locator(".cm-line").nth(lines.index(text)).bounding_box()
    gutter = cell.locator(".cm-gutter.cm-breakpoint-gutter").bounding_box()
    notebook.shown.mouse.click(gutter["x"] + gutter["width"] / 2, box["y"] + box["height"] / 2)


def command(notebook: Lab, name: str) -> None:
    """Runs a command, as the button of the debugger's side bar does."""
    notebook.shown.evaluate("name => void window.jupyterapp.commands.execute(`debugger:${name}`)", name)


def test_a_gutter_breakpoint_stops_actors_until_the_bug_button_is_off(notebook: Lab) -> None:
    shown = notebook.shown
    bug(notebook)
    click_gutter(notebook, "loss = x + rank / 2")
    shown.locator(".jp-DebuggerBreakpoint").wait_for(timeout=20_000)
    output = notebook.start(CALL)
    frame = shown.locator(".jp-DebuggerCallstackFrame", has_text="Trainer.step")
    frame.wait_for(timeout=20_000)
    shown.locator(".jp-DebuggerEditor-highlight").wait_for(timeout=10_000)
    ranks = shown.locator("#mnb-dap-ranks")
    stopped = ranks.locator(".mnb-dap-rank")
    stopped.nth(7).wait_for(timeout=20_000)  # a step moves all ranks stopped by then
    assert stopped.count() == 8
    shows(notebook, "rank", str(index_of(ranks.locator('.mnb-dap-rank[aria-pressed="true"]').inner_text())))
    assert "[*]" in notebook.prompt().inner_text(), "all of that while the cell waits"

    ranks.get_by_role("button", name="trainers hosts=1 gpus=2").click(timeout=20_000)
    shows(notebook, "rank", "6")
    picture(notebook, "lab_debugger_light")
    theme(shown, "JupyterLab Dark")
    picture(notebook, "lab_debugger_dark")
    theme(shown, "JupyterLab Light")

    command(notebook, "next")
    shows(notebook, "loss", "13")
    evaluate(notebook, "loss = 100")
    command(notebook, "next")
    shows(notebook, "total", "200")

    log = ranks.get_by_label("log of")
    ranks.locator("summary").first.click()
    log.fill("loss of {rank}: {x:.1f}")
    log.press("Enter")
    command(notebook, "continue")
    notebook.idle()
    assert "[20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 27.0, 200]" in notebook.read(output, "200"), "it was set on one rank"

    printed = notebook.run(CALL)
    assert "loss of 7: 10.0" in notebook.read(printed, "loss of 7"), "a logpoint prints and does not stop"

    log.fill("")
    log.press("Enter")
    output = notebook.start(CALL)
    frame.wait_for(timeout=20_000)
    bug(notebook)
    notebook.idle()
    assert "27" in notebook.read(output, "27")
    frame.wait_for(state="detached", timeout=10_000)
    assert "27" in notebook.read(notebook.run(CALL), "27"), "nothing stops any more"
    assert notebook.errors == []


def index_of(rank: str) -> int:
    """The rank of `trainers hosts=1 gpus=2`, of four on each host."""
    host, gpu = (int(word.partition("=")[2]) for word in rank.split()[1:])
    return 4 * host + gpu


def shows(notebook: Lab, name: str, value: str) -> None:
    """Waits until JupyterLab's list of variables has a value beside a name."""
    notebook.shown.wait_for_function(
        """([name, value]) => [...document.querySelectorAll("#jp-debugger-sidebar .jp-DebuggerVariables-name")].some(
            each => each.textContent === name && each.nextElementSibling?.textContent === value)""",
        arg=[name, value],
        timeout=10_000,
    )


def evaluate(notebook: Lab, code: str) -> None:
    """Evaluates in the console of JupyterLab's debugger."""
    command(notebook, "evaluate")
    console = notebook.shown.locator(".jp-DebugConsole")
    console.locator(".jp-CodeConsole-promptCell .cm-content").click(timeout=20_000)
    notebook.shown.keyboard.type(code)
    notebook.shown.keyboard.press("Shift+Enter")
    console.locator(".jp-CodeConsole-content .jp-CodeCell", has_text=code).wait_for(timeout=10_000)
    shows(notebook, *code.split(" = "))
    command(notebook, "evaluate")  # which closes it
    console.wait_for(state="detached", timeout=10_000)
    notebook.shown.locator(".jp-Notebook").click(position={"x": 5, "y": 5})  # it is in front again


def picture(notebook: Lab, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    notebook.shown.screenshot(path=SCREENSHOTS / f"{name}.png")
