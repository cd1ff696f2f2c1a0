"""A real JupyterLab behind a proxy that stops for a minute, or loses messages: afterwards the state is right."""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import KERNEL_IS_IDLE, SCREENSHOTS, Desk, Lab, opened, panel_built, write_notebook
from tests.browser.test_lab_debugger import click_gutter, command
from tests.frames import FrameProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
AWAY_SECONDS = float(os.environ.get("MONARCH_TEST_AWAY", "60"))

TRAINER = """
import time
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, seconds):
        time.sleep(seconds)
        return self.learn(current_rank().rank)

    def learn(self, rank):
        loss = 10 + rank
        return loss
"""
BEGIN = "import os, signal\nos.environ['MONARCH_NB_PRELOAD'] = ''\n%load_ext monarch"
MESH = """
%mesh workers gpus=2
%mesh spare gpus=2
trainers = workers.spawn("trainers", Trainer)
trainers.initialized.get()
pids = list(spare.run(os.getpid).get().values())
print("pids", *pids)
"""


@pytest.fixture
def proxied(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, FrameProxy]]:
    """A notebook behind the proxy, with two meshes; the second one's display is in a cell."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("proxied") / "proxied.ipynb", ["x = 1"])
    proxy = FrameProxy(desk.served.url.rstrip("/"))
    try:
        address = desk.served.add(path).replace(desk.served.url.rstrip("/"), f"http://127.0.0.1:{proxy.port}")
        with opened(desk.by, address, 1600, 1000) as shown:
            notebook = Lab(shown)
            notebook.run(BEGIN)
            notebook.run(TRAINER)
            yield notebook, proxy
            notebook.run("%stop --all")
    finally:
        desk.served.end_kernels()
        proxy.close()


LIVES = """
from monarch_nb.mesh import state_of
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of
print("lives", store_of(current_runtime()).document()["ranks"][state_of(spare).uid]["0"]["incarnation"])
"""


def rank(display: Any, index: int, state: str) -> Any:
    return display.locator(f'.mnb-cell[data-index="{index}"][data-state="{state}"]')


def spawn_spare(notebook: Lab) -> tuple[Any, list[int]]:
    """The display of the mesh `spare`, and its processes."""
    printed = notebook.run(MESH)
    pids = [int(word) for word in notebook.read(printed, r"pids \d+ \d+").split("pids")[-1].split()]
    display = notebook.run("spare")
    rank(display, 1, "idle").wait_for(timeout=20_000)
    notebook.shown.evaluate("window.jupyterapp.commands.execute('monarch-nb:open')")
    notebook.shown.locator('.mnb-panel .mnb-outline-row:has(.mnb-outline-name:text-is("spare"))').first.wait_for()
    return display, pids


def test_views_and_buttons_work_after_a_minute_without_a_connection(proxied: tuple[Lab, FrameProxy]) -> None:
    notebook, proxy = proxied
    shown = notebook.shown
    display, pids = spawn_spare(notebook)
    shown.locator(".jp-DebuggerBugButton").click()
    click_gutter(notebook, "loss = 10 + rank")
    shown.locator(".jp-DebuggerBreakpoint").wait_for(timeout=20_000)

    output = notebook.start("sorted(trainers.step.call(4).get().values())")
    notebook.prompt().filter(has_text="*").wait_for(timeout=10_000)
    proxy.cut()
    os.kill(pids[1], 9)
    panel = shown.locator(".mnb-panel")
    panel.locator(".mnb-panel-summary", has_text="not connected").wait_for(timeout=20_000)
    shown.screenshot(path=SCREENSHOTS / "proxied_away.png")
    time.sleep(AWAY_SECONDS)  # the time that is tried
    proxy.mend()

    # JupyterLab itself retries after up to a minute, and gives up after some tries; then the panel makes it retry.
    rank(display, 1, "failed").wait_for(timeout=120_000)
    panel.locator(".mnb-panel-summary", has_text="1 failed").wait_for(timeout=20_000)
    shown.locator(".jp-DebuggerCallstackFrame", has_text="learn").first.wait_for(timeout=30_000)
    stopped = shown.locator("#mnb-dap-ranks .mnb-dap-rank")
    stopped.nth(1).wait_for(timeout=20_000)
    shown.screenshot(path=SCREENSHOTS / "proxied_back.png")

    dialog = shown.locator(".jp-Dialog", has_text="Server Connection Error")
    if dialog.count():  # JupyterLab's own, which has come meanwhile and stays
        dialog.get_by_role("button", name="Close").click()
    display.get_by_role("button", name=re.compile("Heal")).first.click(timeout=10_000)
    rank(display, 1, "idle").wait_for(timeout=20_000)
    command(notebook, "continue")
    assert "[10, 11]" in notebook.read(output, r"\[10, 11\]")
    notebook.idle()
    shown.locator(".jp-DebuggerBugButton").click()
    assert "2" in notebook.read(notebook.run("1 + 1"), "2")
    assert notebook.errors == []


def test_messages_lost_by_a_proxy_are_repeated_and_clicks_act_once(proxied: tuple[Lab, FrameProxy]) -> None:
    notebook, proxy = proxied
    shown = notebook.shown
    display, pids = spawn_spare(notebook)
    proxy.loses = True
    os.kill(pids[0], 9)
    time.sleep(2)  # no message of the kernel passes
    assert rank(display, 0, "failed").count() == 0
    assert proxy.lost > 0
    proxy.loses = False
    # Nothing else happens: the views ask every 30 s.
    rank(display, 0, "failed").wait_for(timeout=45_000)
    shown.locator(".mnb-panel .mnb-panel-summary", has_text="1 failed").wait_for(timeout=45_000)

    proxy.loses = True
    display.get_by_role("button", name=re.compile("Heal")).first.click()
    time.sleep(3)  # it is healed, and no page learns of it
    proxy.loses = False
    rank(display, 0, "idle").wait_for(timeout=45_000)
    shown.locator(".mnb-b.mnb-waits").wait_for(state="detached", timeout=10_000)
    shown.wait_for_function(KERNEL_IS_IDLE, timeout=40_000)
    assert "lives 1" in notebook.read(notebook.run(LIVES), r"lives \d"), "it was healed once"
    assert notebook.errors == []
