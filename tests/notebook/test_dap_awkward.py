"""The debugger of a front end where the code is awkward: it hangs, is huge, is async, or has changed since."""

import json
from collections.abc import Iterator

import pytest

from tests.notebook.dap_client import TRAINER, Debugger, named, training
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with training() as opened:
        yield opened


@pytest.fixture
def debugger(notebook: Notebook) -> Iterator[Debugger]:
    switched_on = Debugger(notebook).on()
    yield switched_on
    switched_on.off()


LOOPER = """\
import asyncio
from monarch.actor import Actor, endpoint

class Looper(Actor):
    @endpoint
    async def step(self, x):
        more = await self.later(x)
        return more + 1

    async def later(self, x):
        await asyncio.sleep(0.01)
        return 2 * x
"""


def test_a_breakpoint_in_an_async_endpoint_steps_over_awaits(debugger: Debugger) -> None:
    code = LOOPER
    debugger.finish(debugger.start(code)).ok()
    debugger.finish(debugger.start("loop = w.slice(gpus=0).spawn('loop', Looper)")).ok()
    debugger.mark(code, "more = await self.later(x)")
    cell = debugger.start("loop.step.call_one(3).get()")
    debugger.event("stopped")
    assert debugger.variables()["x"]["value"] == "3"
    debugger.do("next", threadId=1)
    debugger.event("stopped")
    assert debugger.variables()["more"]["value"] == "6"
    debugger.do("continue", threadId=1)
    assert debugger.finish(cell).ok().text == "7"
    debugger.finish(debugger.start("loop.stop().get()")).ok()


def test_actors_reloaded_while_stopped_end_and_stop_in_new_code(debugger: Debugger) -> None:
    before = named("Stale")
    debugger.finish(debugger.start(before)).ok()
    debugger.finish(debugger.start("stale = w.slice(gpus=0).spawn('stale', Stale)")).ok()
    debugger.mark(before, "loss = x + rank")
    debugger.finish(debugger.start("f = stale.step.call_one(1)")).ok()
    debugger.event("stopped")
    later = before.replace("loss = x + rank", "loss = x + rank + 100")
    debugger.finish(debugger.start(later)).ok()
    cell = debugger.start(
        "from monarch.actor import reload_mesh\ndone = reload_mesh(stale, Stale)\nf.get(), done.get()"
    )
    debugger.mark(later, "loss = x + rank + 100")
    assert debugger.variables()["x"]["value"] == "1", "it stands where it stood"
    debugger.do("continue", threadId=1)
    debugger.finish(cell).ok()
    cell = debugger.start("f.get(), stale.step.call_one(1).get()")
    debugger.event("stopped")
    debugger.do("continue", threadId=1)
    assert debugger.finish(cell).ok().text == "(2, 202)"
    debugger.finish(debugger.start("stale.stop().get()")).ok()


def test_hanging_reprs_and_huge_values_are_bounded_and_tensors_summarised(debugger: Debugger) -> None:
    code = TRAINER.replace("doubled = self.learn(loss)", "hang, many = Hang(), list(range(1_000_000))").replace(
        "return doubled", "return len(many)"
    )
    code = "class Hang:\n    def __repr__(self):\n        while True:\n            pass\n\n" + named("Hanging", code)
    debugger.finish(debugger.start(code)).ok()
    debugger.finish(debugger.start("import numpy as np\nhung = w.slice(gpus=0).spawn('hung', Hanging)")).ok()
    debugger.mark(code, "return len(many)")
    cell = debugger.start("hung.step.call_one(np.arange(12.0)).get()")
    debugger.event("stopped")
    variables = debugger.variables()
    assert "repr takes too long" in variables["hang"]["value"]
    assert "1000000" in str(variables["many"]["indexedVariables"])
    page = debugger.do("variables", variablesReference=variables["many"]["variablesReference"])["variables"]
    assert (len(page), page[-1]["value"]) == (201, "999800 more")
    assert "float64[12]" in variables["x"]["value"]
    rich = debugger.do("richInspectVariables", variableName="x", frameId=debugger.frames()[0]["id"])["data"]
    assert "<th>shape</th><td>12</td>" in rich["text/html"]
    debugger.do("continue", threadId=1)
    assert debugger.finish(cell).ok().text == "1000000"
    debugger.finish(debugger.start("hung.stop().get()")).ok()


HUGE = (
    named("Huge", TRAINER)
    .replace("return doubled", "return len(text)")
    .replace("doubled = self.learn(loss)", "text, items = 'x' * 20_000_000, {n: 'y' * 100_000 for n in range(300)}")
)


def test_no_answer_is_longer_than_what_proxies_let_through(debugger: Debugger) -> None:
    debugger.finish(debugger.start(HUGE)).ok()
    debugger.finish(debugger.start("huge = w.slice(gpus=0).spawn('huge', Huge)")).ok()
    debugger.mark(HUGE, "return len(text)")
    cell = debugger.start("huge.step.call_one(1).get()")
    debugger.event("stopped")
    top = debugger.frames()[0]["id"]
    (items,) = (row for name, row in debugger.variables().items() if name == "items")
    for asked in (
        {"command": "evaluate", "expression": "text", "frameId": top, "context": "repl"},
        {"command": "evaluate", "expression": "print(text)", "frameId": top, "context": "repl"},
        {"command": "evaluate", "expression": "1 / 0 if text else 0, text", "frameId": top, "context": "repl"},
        {"command": "evaluate", "expression": "raise ValueError(text)", "frameId": top, "context": "repl"},
        {"command": "richInspectVariables", "variableName": "text", "frameId": top},
        {"command": "richInspectVariables", "variableName": "items", "frameId": top},
        {"command": "variables", "variablesReference": items["variablesReference"], "count": 1_000_000},
        {"command": "setVariable", "variablesReference": debugger.scope(), "name": "copy", "value": "text * 2"},
    ):
        assert len(json.dumps(debugger.ask(**asked))) < 2_000_000, asked
    debugger.do("continue", threadId=1)
    assert debugger.finish(cell).ok().text == "20000000"
    debugger.finish(debugger.start("huge.stop().get()")).ok()
