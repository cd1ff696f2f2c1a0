"""The debugger of a front end on the ranks of a mesh, over the control channel of a real kernel."""

from collections.abc import Iterator

import pytest

from tests.notebook.dap_client import Debugger
from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

TRAINER = """\
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    def __init__(self, scale=1):
        self.scale = scale

    @endpoint
    def step(self, x):
        rank = current_rank().rank
        loss = x + rank
        doubled = self.learn(loss)
        return doubled

    def learn(self, loss):
        result = loss * 2
        return result * self.scale

    @endpoint
    def fails(self, x):
        try:
            return 1 / x
        except ZeroDivisionError:
            return -1
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    opened = Notebook()
    opened.run(TRAINER).ok()
    opened.run("%mesh w gpus=3").ok()
    opened.run("t = w.spawn('trainers', Trainer)\nt.initialized.get()").ok()
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def debugger(notebook: Notebook) -> Iterator[Debugger]:
    switched_on = Debugger(notebook).on()
    yield switched_on
    switched_on.off()


def test_a_gutter_breakpoint_stops_ranks_whose_variables_are_read_set_and_stepped_over(debugger: Debugger) -> None:
    (mark,) = debugger.mark(TRAINER, "loss = x + rank")
    assert mark["verified"]
    cell = debugger.start("t.step.call(10).get().values()")
    stop = debugger.event("stopped")
    assert (stop["threadId"], stop["reason"]) == (1, "breakpoint")
    top = debugger.frames()[0]
    assert (top["name"], top["line"]) == ("Trainer.step", mark["line"])
    assert debugger.variables()["x"]["value"] == "10"
    assert debugger.do("evaluate", expression="x * 3", frameId=top["id"], context="repl")["result"] == "30"
    debugger.do("next", threadId=1)
    assert debugger.event("stopped")["reason"] == "step"
    scope = debugger.do("scopes", frameId=debugger.frames()[0]["id"])["scopes"][0]["variablesReference"]
    assert debugger.do("setVariable", variablesReference=scope, name="loss", value="100")["value"] == "100"
    debugger.do("stepIn", threadId=1)
    debugger.event("stopped")
    assert [frame["name"] for frame in debugger.frames()] == ["Trainer.learn", "Trainer.step"]
    debugger.do("continue", threadId=1)
    debugger.event("continued")
    assert "200" in debugger.finish(cell).ok().text
