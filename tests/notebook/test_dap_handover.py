"""The debugger of a front end where meshes change hands: left, attached again, and taken over by another notebook."""

from pathlib import Path

import pytest

from tests.notebook.dap_client import TRAINER, Debugger, training
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # each has two kernels


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train.ipynb")


# tests/unit/test_debug_actors.py has that of the names of cells.
def test_the_next_kernel_sees_stopped_ranks_of_a_detached_mesh() -> None:
    notebook = Notebook()
    try:
        notebook.run(TRAINER).ok()
        notebook.run("%mesh left gpus=2\ntrainers = left.spawn('trainers', Trainer)\ntrainers.initialized.get()").ok()
        debugger = Debugger(notebook).on()
        debugger.mark(TRAINER, "loss = x + rank")
        debugger.finish(debugger.start("f = trainers.step.call(1)")).ok()
        debugger.event("stopped")
        notebook.run("%detach left --lease 1m").ok()
        notebook.restart()
        assert "left is back" in notebook.run("%attach left").ok().stdout
        debugger = Debugger(notebook).on()
        (mark,) = debugger.mark(TRAINER, "doubled = self.learn(loss)")
        debugger.event("stopped")
        debugger.until(lambda: sum(len(row["ranks"]) for row in debugger.do("monarchThreads")["threads"]) == 2)
        assert debugger.variables()["x"]["value"] == "1"
        debugger.do("continue", threadId=1)
        debugger.event("stopped")
        top = debugger.frames()[0]
        assert (top["line"], top["source"]["path"]) == (mark["line"], mark["source"]["path"])
        debugger.off()
        assert notebook.run("list(trainers.step.call(1).get().values())").ok().text == "[2, 4]"
        notebook.run("%stop left").ok()
    finally:
        notebook.close()


def ranks(debugger: Debugger) -> int:
    """How many are stopped, as a page shows them."""
    return sum(len(row["ranks"]) for row in debugger.do("monarchThreads")["threads"])


def test_a_takeover_hands_stopped_ranks_to_the_new_notebook() -> None:
    first, second = Notebook(), Notebook()
    try:
        first.run("%detach --keep 2m").ok()
        first.run(TRAINER).ok()
        first.run("%mesh shared gpus=2\ntrainers = shared.spawn('trainers', Trainer)\ntrainers.initialized.get()").ok()
        had, has = Debugger(first).on(), Debugger(second).on()
        had.mark(TRAINER, "loss = x + rank")
        cell = had.start("trainers.step.call(1).get().values()")
        had.event("stopped")
        had.until(lambda: ranks(had) == 2)

        refusal = has.finish(has.start("%attach shared"))
        assert f"held by the kernel of train.ipynb (process {first.pid} on" in refusal.traceback
        assert ranks(has) == 0
        assert had.variables()["x"]["value"] == "1", "who asks in vain changes nothing"

        assert "taken over from" in has.finish(has.start("%attach shared --steal")).ok().stdout
        has.event("stopped")
        has.until(lambda: ranks(has) == 2)
        had.event("continued")
        assert ranks(had) == 0
        for command in ("continue", "next", "stepIn", "stepOut"):
            refused = had.ask(command, threadId=1)
            assert (refused["success"], refused["message"]) == (False, "no rank is stopped")
        assert f"taken over by the kernel of train.ipynb (process {second.pid} on" in had.finish(cell).traceback
        had.off()
        had.on().mark(TRAINER, "doubled = self.learn(loss)")

        assert has.variables()["x"]["value"] == "1"
        has.do("next", threadId=1)
        has.event("stopped")
        has.do("continue", threadId=1)
        has.event("continued")
        again = has.start("list(trainers.step.call(1).get().values())")
        assert has.finish(again).ok().text == "[2, 4]", "breakpoints of the other notebook went with it"

        has.mark(TRAINER, "loss = x + rank")
        again = has.start("list(trainers.step.call(1).get().values())")
        has.event("stopped")
        first.close()
        assert ranks(has) > 0, "it has nothing to do with them any more"
        has.off()
        assert has.finish(again).ok().text == "[2, 4]"
        second.run("%stop shared").ok()
    finally:
        first.close()
        second.close()


def test_a_kernel_restarted_with_stopped_ranks_begins_anew_and_nothing_hangs() -> None:
    with training() as notebook:
        debugger = Debugger(notebook).on()
        debugger.mark(TRAINER, "loss = x + rank")
        debugger.start("t.step.call(1).get()")
        debugger.event("stopped")
        notebook.restart()
        debugger = Debugger(notebook)
        info = debugger.do("debugInfo")
        assert (info["isStarted"], info["stoppedThreads"], info["breakpoints"]) == (False, [], [])
        for command in ("continue", "next", "stepIn", "stepOut"):
            assert not debugger.ask(command, threadId=1)["success"]
        assert ranks(debugger.on()) == 0
        debugger.off()
