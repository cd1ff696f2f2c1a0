"""The debugger in a real JupyterLab: ranks stop, the prompt of the cell takes commands, a click resumes them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Desk, Lab, panel_built, write_notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # tests/notebook has the same without a browser

BEGIN = """
%load_ext monarch
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, x):
        rank = current_rank().rank
        loss = float("nan") if rank == 2 else x + rank
        breakpoint()
        return self.learn(loss)

    def learn(self, loss):
        if loss != loss:
            breakpoint()
        return loss * 2

    @endpoint
    def check(self, x):
        rank = current_rank().rank
        loss = float("nan") if rank == 2 else x + rank
        if loss != loss:
            breakpoint()
        else:
            breakpoint()
        return loss

%mesh workers gpus=4
trainers = workers.spawn("trainers", Trainer)
trainers.initialized.get()
"""
# However long that takes, the first question is about all.
ALL_STOPPED = "import monarch.debug\nfuture = trainers.{}.call(1)\nmonarch.debug.wait(4)\nfuture.get()"
# The section opened last has more room than the others.
MOST_ROOM = """() => {
    const sections = [...document.querySelectorAll(".mnb-section")].sort((a, b) => b.clientHeight - a.clientHeight);
    return sections[0].id === "mnb-section-sessions";
}"""


@pytest.fixture(scope="module")
def notebook(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    path = write_notebook(tmp_path_factory.mktemp("debugger") / "debugger.ipynb", [BEGIN])
    with desk.open(path) as shown:
        opened = Lab(shown)
        opened.run("import os\nos.environ['MONARCH_NB_PRELOAD'] = ''  # nothing here needs torch")
        opened.run(BEGIN)
        yield opened
        opened.run("%stop --all")


def answer(output: Any, command: str) -> None:
    box = output.locator(".jp-Stdin-input")
    box.wait_for(timeout=20_000)
    box.fill(command)
    box.press("Enter")


def await_question(output: Any) -> None:
    """Waits until one question is asked: the one before may stay in the page a little longer."""
    from playwright.sync_api import expect

    expect(output.locator(".jp-Stdin-input")).to_have_count(1, timeout=10_000)


def test_the_prompt_compares_four_stopped_ranks_and_a_click_continues(notebook: Lab) -> None:
    output = notebook.start(ALL_STOPPED.format("step"))
    answer(output, "diff loss")
    output.get_by_text("! nan").wait_for(timeout=10_000)
    view = output.locator(".mnb-debug")
    view.get_by_text("4 ranks stopped").wait_for(timeout=20_000)
    view.get_by_role("button", name="details").click()
    view.locator(".mnb-group", has_text="4 of 4").filter(has_text="trainers gpus=0-3").wait_for()
    assert view.locator(".mnb-here code").inner_text().strip() == "breakpoint()"
    view.locator(".mnb-vars tr", has_text="loss").locator(".mnb-odd", has_text="gpus=2").wait_for()
    view.get_by_label("watch an expression").fill("loss * 10")
    view.get_by_label("watch an expression").press("Enter")
    view.locator(".mnb-watch .mnb-spark", has_text="×").wait_for(timeout=10_000)
    view.get_by_role("button", name="Next").click()
    view.locator(".mnb-here code", has_text="return self.learn(loss)").wait_for(timeout=10_000)
    await_question(output)  # all of that while the cell waits

    view.get_by_role("button", name="Continue").click()  # the odd one stops again, one call deeper
    view.locator(".mnb-group", has_text="1 of 4").filter(has_text="trainers gpus=2").wait_for(timeout=10_000)
    view.get_by_role("button", name="Up").click()
    view.locator(".mnb-here code", has_text="return self.learn(loss)").wait_for(timeout=10_000)
    view.get_by_role("button", name="Continue").click()
    notebook.idle()
    output.get_by_text("ValueMesh").wait_for(timeout=10_000)
    output.locator(".jp-Stdin-input").wait_for(state="detached", timeout=10_000)  # no question is open
    assert notebook.errors == []


def test_without_a_prompt_the_list_of_stopped_ranks_has_buttons(notebook: Lab) -> None:
    notebook.run("future = trainers.slice(gpus=1).step.call_one(1)\nimport monarch.debug; monarch.debug.wait(1);")
    view = notebook.run("%mdb").locator(".mnb-debug")
    view.locator(".mnb-group", has_text="trainers gpus=1").wait_for(timeout=20_000)
    view.get_by_role("button", name="Continue").click()
    view.get_by_text("nothing is stopped").wait_for(timeout=10_000)
    assert notebook.read(notebook.run("future.get()"), r"\d\s*$").split()[-1] == "2"
    assert notebook.errors == []


def test_the_panel_groups_four_ranks_at_two_lines_and_continues_them(notebook: Lab) -> None:
    panel_built()
    output = notebook.start(ALL_STOPPED.format("check"))
    answer(output, "diff loss")
    output.get_by_text("! nan").wait_for(timeout=10_000)
    notebook.shown.evaluate("() => void window.jupyterapp.commands.execute('monarch-nb:open')")
    panel = notebook.shown.locator(".mnb-panel")
    panel.get_by_text("Debugger · 4 stopped").click(timeout=20_000)
    notebook.shown.wait_for_function(MOST_ROOM, timeout=10_000)
    view = panel.locator(".mnb-debug")
    three = view.locator(".mnb-group", has_text="3 of 4").filter(has_text="trainers gpus=0-1,3")
    three.wait_for(timeout=20_000)
    single = view.locator(".mnb-group", has_text="1 of 4").filter(has_text="trainers gpus=2")
    view.locator(".mnb-group", has_text="all 4").wait_for(timeout=10_000)
    single.wait_for(timeout=10_000)
    assert view.locator(".mnb-group").count() == 3
    assert "step" not in three.inner_text()
    assert "check" in three.inner_text()
    assert "check" in single.inner_text()
    assert "[*]" in notebook.prompt().inner_text(), "all of that while the cell waits"

    view.get_by_role("button", name="Continue").click()  # the largest group; the single rank stays stopped
    three.wait_for(state="detached", timeout=10_000)
    panel.get_by_text("Debugger · 1 stopped").wait_for(timeout=10_000)
    output.locator(".jp-Stdin-input").last.wait_for(timeout=10_000)  # that of before may still be there
    single.click()
    view.get_by_role("button", name="Continue").click()
    notebook.idle()
    output.get_by_text("ValueMesh").wait_for(timeout=10_000)
    output.locator(".jp-Stdin-input").wait_for(state="detached", timeout=10_000)
    assert notebook.errors == []
