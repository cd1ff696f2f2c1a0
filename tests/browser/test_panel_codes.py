"""Each action of the panel, by its command and by the cell that it shows: both do the same."""

import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.browser.lab import Desk, Lab, panel_built, write_notebook
from tests.browser.test_panel import ACTORS, Panel
from tests.browser.test_panel_actions import MESH, agree, outcome
from tests.polling import until

pytestmark = pytest.mark.timeout(240)
TRAINERS = (
    ACTORS
    + """
    @endpoint
    def divide(self, number):
        return 1 / number

trainers = workers.spawn("trainers", Trainer)
trainers.pid.call().get();
"""
)
# Two hosts of a job that gives and takes back others.
ELASTIC = """
import signal
import monarch.debug
from monarch.job import AdapterJob
from monarch_kernel.views.timelines import TIMELINES
from monarch_nb.mesh import region_of, run_on, state_of
from monarch_nb.store import describe

job = AdapterJob("process", {"elastic": 2}, {"MONARCH_NB_PRELOAD": ""})
elastic = job.state(None).elastic.spawn_procs({"gpus": 1}, name="elastic")
elastic.initialized.get();

def states(mesh):
    return " ".join(f"{rank.rank}:{rank.state}" for rank in describe(mesh).ranks)
"""


class Row(NamedTuple):
    """An action on some ranks of a mesh. Its result is printed by `look`, or is in a part of the panel."""

    mesh: str
    ranks: list[int] | None
    expected: str  # a regular expression
    look: str = ""
    part: str = ""
    before: str = "0"  # run in the cell that is active then
    after: str = ""
    agrees: str = ""  # the button that confirms the loss
    types: str = ""
    ended: str = ""  # a command of the debugger that ends the prompt of its cell
    says: str = ""  # of a command that writes a cell, which is in the way of others before that


BUSY = "future = trainers.slice(gpus=1).step.call_one(3600)"
HOSTS = "print(dict(elastic.extent), states(elastic))"
# The host's agent is killed, and its death is reported.
LOSES = """
os.kill(int(list(job.agents.values())[-1].id.partition("@")[0]), signal.SIGKILL)
until = time.monotonic() + 20
while "failed" not in states(elastic) and time.monotonic() < until:
    time.sleep(0.05)
"""
ROWS = {
    "heal": Row("workers", [2], "0:idle 1:idle 2:idle 3:idle", "print(states(workers))", before="%kill workers gpus=2"),
    "interrupt": Row("trainers", [1], "KeyboardInterrupt", "print(repr(future.exception(20)))", before=BUSY),
    "stack": Row(
        "trainers", [1], r"step", part="#mnb-section-selected .mnb-lines", before=BUSY, after="%interrupt trainers"
    ),
    "why": Row(
        "trainers",
        None,
        r"gpus=2 alone has not answered trainers\.wait\(\)",
        part="#mnb-section-findings",
        before="future = trainers.wait.call(2)\ntime.sleep(3.5)",
        after="%interrupt trainers",
    ),
    "logs": Row(
        "trainers",
        [3],
        "one step",
        part="#mnb-section-logs .mnb-line",
        before="trainers.slice(gpus=3).step.call_one(0).get()",
    ),
    "timeline": Row(
        "workers",
        [1],
        r"workers \[1\] recorded",
        "seen = TIMELINES.all[0]\nprint(seen.name, list(seen.region.ranks()), 'ended' if seen.ended else 'recorded')",
        after="%timeline --stop",
    ),
    "run": Row(
        "workers",
        [2],
        r"\[42\]",
        "print(list(run_on(workers.slice(gpus=2), 'made').get().values()))",
        before="made = 40 + 2",
        after="run_on(workers.slice(gpus=2), 'del made').get();",
        says="the cell runs on workers gpus=2",
    ),
    "break": Row(
        "trainers",
        [3],
        r"Trainer\.step if seconds > 60 on trainers.*\[3\]",
        "print([(each, list(region_of(each.mesh).ranks())) for each in monarch.debug.breakpoints()])",
        types="Trainer.step if seconds > 60",
        after="%break clear",
    ),
    "debug": Row(
        "trainers",
        [3],
        "step",
        part="#mnb-section-sessions .mnb-debug",
        before="%break Trainer.step on trainers gpus=3\nfuture = trainers.slice(gpus=3).step.call_one(0)\n"
        "monarch.debug.wait(1);",
        after="%break clear\nmonarch.debug.resume()\nfuture.get(20)",
    ),
    "frames": Row(
        "trainers",
        [1],
        "divide",
        part="#mnb-section-sessions .mnb-debug",
        before="try:\n    trainers.slice(gpus=1).divide.call_one(0).get()\nexcept Exception:\n    pass",
        after="monarch.debug.release(trainers)",
        ended="q",
    ),
    "grow": Row("elastic", None, r"'hosts': 3.*0:idle 1:idle 2:idle", HOSTS, after="%mesh elastic hosts=-1"),
    "shrink": Row(
        "elastic", None, r"'hosts': 1.*0:idle$", HOSTS, after="%mesh elastic hosts=+1", agrees="Remove the Last Host"
    ),
    "spare": Row("elastic", None, r"'hosts': 2.*0:idle 1:idle", HOSTS, before=LOSES),
    "restart": Row(
        "workers",
        [0],
        r"another True.*idle",
        "print('another', trainers.slice(gpus=0).pid.call_one().get() != pid, states(workers))",
        before="pid = trainers.slice(gpus=0).pid.call_one().get()",
        agrees="Kill and Heal",
    ),
    "stop": Row(
        "extra", None, "stopped by", "print(state_of(extra).stopped)", before="%mesh extra gpus=1", agrees="Stop"
    ),
    "kill": Row(
        "trainers", [3], "3:failed", "print(states(workers))", before="0", after="%heal workers", agrees="Kill"
    ),
}
FAST = ("interrupt", "logs")
# Commands for the panel and the notebook, not for the selected ranks.
GLOBAL = {
    *("open", "load", "spawn", "failures", "show-code", "insert-code", "why-all", "new-notebook", "where", "notify")
}
NAMES = (
    "window.jupyterapp.commands.listCommands()"
    ".filter(id => id.startsWith('monarch-nb:')).map(id => id.slice('monarch-nb:'.length))"
)


# The panel knows the mesh, which its label then names.
LABELLED = "([id, args]) => window.jupyterapp.commands.label(id, args).includes(args.mesh)"


@pytest.fixture(scope="module")
def panel(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """Four actors on four processes, and two hosts of a job."""
    panel_built()
    path = write_notebook(tmp_path_factory.mktemp("codes") / "codes.ipynb", ["x = 1"])
    with desk.open(path) as shown:
        opened = Panel(Lab(shown))
        opened.lab.run(MESH)
        opened.lab.run(TRAINERS)
        opened.lab.run(ELASTIC)
        opened.open()
        opened.row("elastic")
        yield opened
        opened.lab.run("job.kill()")


def test_each_command_that_acts_on_ranks_has_a_row_here(panel: Panel) -> None:
    assert set(panel.shown.evaluate(NAMES)) - GLOBAL == set(ROWS)


def await_effect(panel: Panel, row: Row, locator: Any) -> None:
    """Waits until the expected effect is there."""
    if not row.look:
        locator.filter(has_text=re.compile(row.expected)).first.wait_for(timeout=20_000)
        return
    end = time.monotonic() + 20
    text = ""
    while re.search(row.expected, text) is None:
        assert time.monotonic() < end, f"{row.expected!r} is not in {text!r}"
        text = panel.lab.read(panel.lab.run(f"{row.look}\nprint('over')"), "over").split("over")[0].strip()


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_the_cell_that_an_action_shows_does_what_its_button_does(panel: Panel, name: str) -> None:
    row = ROWS[name]
    meant = {"mesh": row.mesh, **({} if row.ranks is None else {"ranks": row.ranks})}

    def begin(**more: Any) -> None:
        panel.lab.run(row.before)
        panel.shown.wait_for_function(LABELLED, arg=[f"monarch-nb:{name}", meant], timeout=10_000)
        panel.shown.evaluate(
            "([id, args]) => void window.jupyterapp.commands.execute(id, args)", [f"monarch-nb:{name}", meant | more]
        )
        if row.types:
            panel.shown.locator(".jp-Dialog input").fill(row.types)
            panel.shown.keyboard.press("Enter")

    begin()
    if row.agrees:
        agree(panel, row.agrees)
    if row.says:
        outcome(panel, row.says)
    await_effect(panel, row, panel.node.locator(row.part) if row.part else None)
    panel.lab.run(row.after or "0")

    begin(code=True)
    until(lambda: panel.source() != row.before)
    outcome(panel, "is in a cell")
    cell = panel.start_active()
    if not row.ended:
        panel.lab.idle()
    await_effect(panel, row, cell)
    if row.ended:
        panel.shown.locator(".jp-Stdin-input").fill(row.ended)
        panel.shown.keyboard.press("Enter")
        panel.lab.idle()
    panel.lab.run(row.after or "0")
    assert panel.lab.errors == []
