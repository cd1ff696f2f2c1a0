"""A day in a real JupyterLab, from the launcher to the end of a mesh: by the mouse, and by the keyboard alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.job import job_load
from tests.browser.lab import KERNEL_IS_IDLE, SCREENSHOTS, Desk, Lab, panel_built, theme
from tests.browser.test_panel import ACTORS, Panel
from tests.browser.test_panel_actions import ELSEWHERE
from tests.cluster.engine_tools import PYTHON, SSHServer, needs

pytestmark = pytest.mark.timeout(240)
JOB = """
[jobs.lab]
kind = "ssh"
meshes = {{ hosts = ["{name}", "{name}"] }}
python_exe = "{python}"
ssh_args = "-i {identity}"
known_hosts = "{known_hosts}"
"""
TRAINERS = (
    ACTORS
    + """
    @endpoint
    def learn(self):
        from monarch.telemetry import log
        for step in range(20):
            log(step=step, loss=1 / (step + 1))

trainers = workers.spawn("trainers", Trainer)
trainers.learn.call().get()
"""
)


@pytest.fixture
def job(desk: Desk, tmp_path: Path) -> Iterator[None]:
    """A job "lab" in the folder of notebooks: two hosts that are reached by SSH."""
    needs("sshd", "ssh-keygen", package="openssh-server openssh-client")
    pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
    server = SSHServer(tmp_path)
    file = desk.served.root / "monarch.toml"
    values = {"name": server.name, "identity": server.identity, "known_hosts": server.known_hosts, "python": PYTHON}
    file.write_text(JOB.format(**values))
    yield
    file.unlink()
    job_load(str(desk.served.root / ".monarch" / "jobs" / "lab.json")).kill()
    server.close()


SOURCE = "() => window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
ACTIVE = "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex"
# The defaults of a page.
QUIET = """async () => {
    const {commands} = window.jupyterapp;
    if (commands.isToggled("monarch-nb:notify")) await commands.execute("monarch-nb:notify");
    localStorage.removeItem("monarch-nb:spawned");
}"""
SELECTED = '.mnb-outline-row[aria-selected="true"]'


class Mouse:
    """The actions of a person by clicks; code is typed."""

    theme = "JupyterLab Light"

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.keys = shown.keyboard
        self.panel = Panel(Lab(shown))

    def launch(self) -> None:
        self.shown.locator(".jp-LauncherCard", has_text="Notebook with a Mesh").click()

    def describe(self, job: str, shape: str) -> None:
        """Fills in the dialog."""
        form = self.shown.locator(".mnb-form")
        form.get_by_label("where").select_option(job)
        form.get_by_label("shape").fill(shape)

    def agree(self, button: str) -> None:
        self.shown.locator(".jp-Dialog").get_by_role("button", name=button, exact=True).click()

    def type(self, code: str) -> Any:
        """Types a cell below the active one; gives its output area."""
        self.cell().locator(".jp-InputPrompt").click()
        return self._type(code)

    def run(self) -> None:
        self.shown.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="run"]').get_by_role("button").click()

    def send(self, target: str) -> None:
        """Chooses where the active cell runs."""
        self.cell().locator(".mnb-on-cell select").select_option(target)

    def unfold(self, row: str) -> None:
        self.panel.row(row).dblclick()

    def act(self, row: str, action: str, key: str) -> None:
        """Acts on a row of the tree."""
        self.panel.row(row).click(button="right")
        self.shown.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{action}$")).click()

    def choose_call(self, rank: str, view: Any) -> None:
        view.locator(".b", has_text="step").first.click()

    def resume(self, output: Any) -> None:
        """Resumes the stopped ranks."""
        self.panel.node.get_by_text("Debugger · 2 stopped").click()
        self.panel.node.locator(".mnb-debug").get_by_role("button", name="Continue").click()

    def allow_notifications(self) -> None:
        self.shown.get_by_role("button", name="Allow notifications").click()

    def cell(self) -> Any:
        """The active cell."""
        return self.shown.locator(".jp-Notebook .jp-Cell").nth(self.shown.evaluate(ACTIVE))

    def _type(self, code: str) -> Any:
        self.keys.press("Escape")
        if self.shown.evaluate(SOURCE):
            self.keys.press("b")
        self.keys.press("Enter")
        self.keys.insert_text(code.strip())
        self.shown.wait_for_function(f"code => ({SOURCE})() === code", arg=code.strip(), timeout=10_000)
        return self.cell().locator(".jp-Cell-outputArea")


class Keys(Mouse):
    """The actions of a person by keys alone."""

    theme = "JupyterLab Dark"

    def launch(self) -> None:
        self._command("Notebook with a Mesh")

    def describe(self, job: str, shape: str) -> None:
        self.keys.press("Tab")  # from the name
        self.keys.type(job)
        self.keys.press("Tab")
        self.keys.press("Control+A")
        self.keys.type(shape)

    def agree(self, button: str) -> None:
        self._tab(f'.jp-Dialog button:has-text("{button}")')
        self.keys.press("Enter")

    def type(self, code: str) -> Any:
        while self._is_in(".mnb-panel"):
            self.keys.press("Escape")  # from a section to the tree, and from there to the notebook
        self.shown.locator(".jp-Notebook :focus").wait_for(timeout=10_000)
        return self._type(code)

    def _is_in(self, part: str) -> bool:
        """Whether a part of the page has the focus."""
        return bool(self.shown.evaluate("part => document.activeElement.closest(part) !== null", part))

    def run(self) -> None:
        self.keys.press("Control+Enter")

    def send(self, target: str) -> None:
        self._command("Choose Where the Active Cell Runs…")
        self.shown.locator(".jp-Dialog input:focus").wait_for(timeout=10_000)
        self.keys.press("Control+A")
        self.keys.type(target)
        self.keys.press("Enter")

    def unfold(self, row: str) -> None:
        self._select(row)
        self.keys.press("ArrowRight")

    def act(self, row: str, action: str, key: str) -> None:
        self._select(row)
        self.keys.press(key)

    def _select(self, row: str) -> None:
        if not self._is_in(".mnb-panel"):
            for key in ("Escape", "g", "m"):  # from the notebook
                self.keys.press(key)
        while self._is_in(".mnb-panel") and not self._is_in(".mnb-outline"):
            self.keys.press("Escape")  # from a section, and first from what is chosen there
        self.shown.locator(".mnb-outline:focus").wait_for(timeout=10_000)
        self.keys.press("Home")
        for _ in range(20):
            if self.shown.locator(f"{SELECTED} .mnb-outline-name").inner_text() == row:
                break
            self.keys.press("ArrowDown")

    def choose_call(self, rank: str, view: Any) -> None:
        self.act(rank, "Timeline", "o")  # the one that is recorded
        view.locator("> .mnb-v:focus").wait_for(timeout=10_000)
        self._tab(".mnb-panel .mnb-tl-picture")
        self.keys.press("ArrowDown")

    def resume(self, output: Any) -> None:
        output.locator(".jp-Stdin-input:focus").wait_for(timeout=20_000)
        self.keys.type("c")
        self.keys.press("Enter")

    def allow_notifications(self) -> None:
        self._command("Show Ends of Long Cells on the Desktop")

    def _command(self, name: str) -> None:
        """Runs a command from the palette."""
        self.keys.press("Control+Shift+C")
        self.shown.locator(".lm-CommandPalette-input:focus").wait_for(timeout=10_000)
        self.keys.type(name)
        label = self.shown.locator(".lm-CommandPalette-item.lm-mod-active .lm-CommandPalette-itemLabel")
        label.filter(has_text=name).wait_for(timeout=10_000)
        self.keys.press("Enter")

    def _tab(self, selector: str) -> None:
        for _ in range(12):
            if self.shown.locator(f"{selector}:focus").count():
                return
            self.keys.press("Tab")
        raise AssertionError(f"Tab does not lead to {selector}")


@pytest.mark.parametrize("hands", [Mouse, Keys])
def test_a_day_from_the_launcher_to_the_end_of_a_mesh(desk: Desk, job: None, hands: type[Mouse]) -> None:
    panel_built()
    with desk.empty(f"day-{hands.__name__.lower()}") as shown:
        theme(shown, hands.theme)
        try:
            day(hands(shown))
        finally:
            shown.evaluate(QUIET)
            theme(shown, "JupyterLab Light")
            shown.evaluate("() => window.jupyterapp.shell.currentWidget?.sessionContext?.shutdown()")


def day(person: Mouse) -> None:
    """The stations of a day, a picture of each."""
    shown, panel = person.shown, person.panel
    stations = iter(range(1, 100))

    def picture(name: str) -> None:
        shown.screenshot(path=SCREENSHOTS / f"day-{type(person).__name__.lower()}-{next(stations)}-{name}.png")

    def outcome(text: str) -> None:
        panel.node.locator(".mnb-panel-outcome", has_text=text).wait_for(timeout=30_000)

    person.launch()
    form = shown.locator(".mnb-form")
    form.wait_for(timeout=60_000)
    person.describe("lab", "hosts=2 gpus=1")
    assert form.locator("pre").inner_text() == "%mesh workers hosts=2 gpus=1 --job lab"
    picture("spawn")
    person.agree("Spawn")
    panel.summary("1 mesh · 2/2 ranks")

    person.type(TRAINERS)
    person.run()
    panel.row("trainers")
    output = person.type("f'rank {rank}'")
    person.send("workers")
    picture("cell")
    person.run()
    output.locator(".jp-OutputArea-output", has_text=re.compile("rank 0(.|\n)*rank 1")).wait_for(timeout=20_000)
    picture("ranks")

    person.unfold(panel.node.locator(".mnb-outline-name").last.inner_text())
    rank = "hosts=1 gpus=0"
    person.act(rank, "Kill", "k")
    person.agree("Kill")
    panel.row(rank, "failed")
    outcome("killed 1 proc of workers")
    picture("killed")
    person.act(rank, "Heal", "h")
    outcome("healed 1 proc of workers")
    panel.row(rank, "idle")

    person.act(rank, "Timeline", "o")
    timeline = panel.node.locator("#mnb-section-timeline")
    timeline.get_by_text("Timeline of workers").wait_for(timeout=20_000)
    person.type("trainers.step.call(0.5).get()")
    person.run()
    timeline.locator(".b", has_text="step").first.wait_for(timeout=20_000)
    person.choose_call(rank, timeline)
    timeline.locator(".mnb-message", has_text="trainers.step").wait_for(timeout=10_000)
    picture("timeline")

    person.act("trainers", "Break…", "b")
    shown.locator(".jp-Dialog input:focus").wait_for(timeout=10_000)
    person.keys.press("End")
    person.keys.type("step")
    picture("break")
    person.agree("Ok")
    outcome("at Trainer.step on trainers")
    output = person.type("import monarch.debug\nfuture = trainers.step.call(0.1)\nmonarch.debug.wait(2)\nfuture.get()")
    person.run()
    panel.node.get_by_text("Debugger · 2 stopped").wait_for(timeout=20_000)
    picture("stopped")
    person.resume(output)
    output.locator(".jp-OutputArea-output", has_text="ValueMesh").wait_for(timeout=20_000)
    output.locator(".jp-Stdin-input").wait_for(state="detached", timeout=10_000)  # with it the keys go to its cell
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=20_000)

    output = person.type("%metrics trainers")
    person.run()
    output.locator('.mnb-chart[aria-label*="loss: step 19"]').wait_for(timeout=20_000)
    picture("metrics")

    shown.evaluate(ELSEWHERE)
    person.type("import time\n%notify 500ms")
    person.run()
    shown.get_by_role("button", name="Allow notifications").wait_for(timeout=10_000)
    person.allow_notifications()
    shown.wait_for_function("() => window.Notification.permission === 'granted'", timeout=10_000)
    person.type("time.sleep(1)")
    person.run()
    shown.locator(".mnb-status-item", has_text=re.compile(r"In\[\d+\] ended after \d")).wait_for(timeout=20_000)
    ((title, _),) = shown.evaluate("window.mnbShown")
    assert "ended after" in title
    picture("ended")

    person.act("workers", "Stop", "s")
    person.agree("Stop")
    outcome("stopped 2 procs of workers")
    panel.summary("no meshes")
    picture("end")
    assert panel.lab.errors == []
