"""The debugger in views: the messages to them while a cell waits, and their requests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.debug_tools import LET_GO, Debugged, Talk, stopping
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)
RANKS = 4


@pytest.fixture(scope="module")
def kernel() -> Iterator[Debugged]:
    with stopping(RANKS) as notebook:
        yield notebook


@pytest.fixture
def view(kernel: Debugged) -> Iterator[ViewClient]:
    client = ViewClient(kernel)
    client.send(type="watch", topic="debug", id="D")
    client.until(lambda view: bool(view.of("debug")))
    try:
        yield client
    finally:
        client.close()
        kernel.run(LET_GO).ok()


def now(view: ViewClient) -> dict[str, Any]:
    """The stopped ranks, as the view has them."""
    return view.of("debug")[-1]


def do(view: ViewClient, command: str, **more: Any) -> dict[str, Any]:
    reply = view.ask("debug", do=command, **more)
    assert reply["ok"], reply
    return dict(reply["result"])


def stopped(view: ViewClient, count: int) -> dict[str, Any]:
    view.until(lambda view: now(view)["stopped"] == count)
    return now(view)


def needs_subshell(view: ViewClient) -> None:
    if view.subshell is None:
        pytest.skip("what a view asks for waits for the cell in this kernel")


def test_a_view_drives_stopped_ranks_while_the_cell_waits(kernel: Debugged, view: ViewClient) -> None:
    needs_subshell(view)
    assert now(view)["groups"] == []
    request = str(kernel.client.execute("t.step.call(2).get()", allow_stdin=True))
    assert kernel.next_prompt().startswith("mdb trainers[gpus=")  # nobody answers; some may not have stopped yet
    (group,) = stopped(view, RANKS)["groups"]
    assert (group["name"], group["where"], group["ranks"], group["of"]) == ("trainers", "gpus=0-3", [0, 1, 2, 3], RANKS)
    assert (group["file"], group["line"], group["text"]) == ("Cell In[3]", 17, "breakpoint()")
    assert group["source"]["lines"][17 - group["source"]["first"]].strip() == "breakpoint()"
    assert now(view)["tree"][0]["count"] == RANKS

    variables = {row["name"]: row for row in do(view, "locals")["locals"]}
    assert [value["text"] for value in variables["x"]["values"]] == ["2"]
    odd = variables["loss"]["values"][0]
    assert (odd["text"], odd["odd"], odd["where"], odd["unusual"]) == ("nan", "NaN", "gpus=3", True)
    watched = do(view, "eval", text="loss")
    assert watched["spark"].endswith("×")
    assert watched["values"][0]["number"] is None

    assert "Cell In[3]:18" in do(view, "next", sessions=group["sessions"])["text"]
    view.until(lambda view: now(view)["stopped"] == RANKS and now(view)["groups"][0]["line"] == 18)
    do(view, "continue")
    stopped(view, 0)
    cell = kernel.finish(request).ok()
    assert "any more" not in cell.stdout, "the view answers the question that is left"
    assert "gpus=3: 3" in cell.text


def test_a_prompt_and_a_view_take_turns(kernel: Debugged, view: ViewClient) -> None:
    needs_subshell(view)
    request = str(kernel.client.execute("t.slice(gpus=1).step.call_one(2).get()", allow_stdin=True))
    stopped(view, 1)
    do(view, "next")
    assert do(view, "command", text="p loss")["text"] == "0.5"
    talk = kernel.go_on(request, Talk(), "n", "c")
    assert "Cell In[3]:19" in talk.text
    assert talk.cell.text == "0"
    assert now(view.until(lambda view: now(view)["stopped"] == 0))["groups"] == []


def test_frames_are_shown_to_all_views_and_senseless_requests_refused(kernel: Debugged, view: ViewClient) -> None:
    needs_subshell(view)
    kernel.run("%break Trainer.loss on trainers gpus=0\nf = t.slice(gpus=0).forward.call_one([1, 2])").ok()
    group = stopped(view, 1)["groups"][0]
    assert [frame["function"] for frame in group["stack"]] == ["Trainer.forward", "Trainer.loss"]
    do(view, "up")
    view.until(lambda view: now(view)["groups"][0]["current"] == 0)
    source = now(view)["groups"][0]["source"]
    assert source["lines"][source["line"] - source["first"]].strip() == "return self.loss(scaled)"
    assert "scaled" in {row["name"] for row in do(view, "locals")["locals"]}
    do(view, "frame", frame=1)
    assert "values" in {row["name"] for row in do(view, "locals")["locals"]}
    (point,) = do(view, "breakpoints")["breakpoints"]
    assert point["where"] == "Trainer.loss"
    do(view, "clear", number=point["number"])
    assert "no 'jump'" in view.ask("debug", do="jump")["error"]
    assert "write an expression" in view.ask("debug", do="eval", text=" ")["error"]
    do(view, "continue")
    assert view.ask("debug", do="next")["error"] == "nothing is stopped"
    assert view.ask("debug", do="next", sessions=group["sessions"])["error"] == "the rank is not stopped any more"
    assert kernel.run("f.get()").ok().text


def test_a_rank_that_is_healed_is_no_longer_shown_as_failed(kernel: Debugged, view: ViewClient) -> None:
    kernel.run("f = t.slice(gpus=0).only.call_one([0])").ok()
    stopped(view, 1)
    kernel.run("import os, signal; os.kill(t.slice(gpus=1).pid.call_one().get(), signal.SIGKILL)").ok()

    def failed(view: ViewClient) -> bool:
        return "failed" in str(now(view)["missing"])

    view.until(failed)
    kernel.run("%heal w").ok()
    view.until(lambda view: not failed(view))
    assert now(view)["stopped"] == 1


@pytest.mark.slow
def test_the_frames_of_a_failure_are_opened_on_request(kernel: Debugged, view: ViewClient) -> None:
    needs_subshell(view)
    assert kernel.run("t.slice(gpus=2).forward.call_one([1, 2, 3]).get()").error is not None
    mesh = kernel.run("t._state.uid").text.strip("'")
    opened = view.ask("post_mortem", mesh=mesh, ranks=[2])["result"]
    assert "trainers gpus=2: its frames are open" in opened["text"]
    group = stopped(view, 1)["groups"][0]
    assert group["post_mortem"]
    assert "ZeroDivisionError" in group["reason"]
    do(view, "continue", sessions=opened["sessions"])
    stopped(view, 0)
    assert "no frames of this rank are kept" in view.ask("post_mortem", mesh=mesh, ranks=[1])["error"]
