"""The debugger in faces: what they are sent while a cell waits, and what they can have done."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.debug_tools import LET_GO, Debugged, Talk, stopping
from tests.notebook.face_client import FaceClient

pytestmark = pytest.mark.timeout(120)
RANKS = 4


@pytest.fixture(scope="module")
def kernel() -> Iterator[Debugged]:
    with stopping(RANKS) as notebook:
        yield notebook


@pytest.fixture
def face(kernel: Debugged) -> Iterator[FaceClient]:
    made = FaceClient(kernel)
    made.send(type="watch", topic="debug", id="D")
    made.until(lambda face: bool(face.of("debug")))
    try:
        yield made
    finally:
        made.close()
        kernel.run(LET_GO).ok()


def now(face: FaceClient) -> dict[str, Any]:
    """What is stopped, as the face knows it."""
    return face.of("debug")[-1]


def do(face: FaceClient, what: str, **more: Any) -> dict[str, Any]:
    reply = face.ask("debug", do=what, **more)
    assert reply["ok"], reply
    return dict(reply["result"])


def stopped(face: FaceClient, count: int) -> dict[str, Any]:
    face.until(lambda face: now(face)["stopped"] == count)
    return now(face)


def needs_subshell(face: FaceClient) -> None:
    if face.subshell is None:
        pytest.skip("what a face asks for waits for the cell in this kernel")


def test_a_face_shows_what_is_stopped_and_drives_it_while_the_cell_waits_which_then_ends(
    kernel: Debugged, face: FaceClient
) -> None:
    needs_subshell(face)
    assert now(face)["groups"] == []
    request = str(kernel.client.execute("t.step.call(2).get()", allow_stdin=True))
    assert kernel.asked().startswith("mdb trainers[gpus=")  # which nobody answers; some may not have stopped yet
    (group,) = stopped(face, RANKS)["groups"]
    assert (group["name"], group["where"], group["ranks"], group["of"]) == ("trainers", "gpus=0-3", [0, 1, 2, 3], RANKS)
    assert (group["file"], group["line"], group["text"]) == ("Cell In[3]", 17, "breakpoint()")
    assert group["source"]["lines"][17 - group["source"]["first"]].strip() == "breakpoint()"
    assert now(face)["tree"][0]["count"] == RANKS

    variables = {each["name"]: each for each in do(face, "locals")["locals"]}
    assert [value["text"] for value in variables["x"]["values"]] == ["2"]
    odd = variables["loss"]["values"][0]
    assert (odd["text"], odd["odd"], odd["where"], odd["unusual"]) == ("nan", "NaN", "gpus=3", True)
    watched = do(face, "eval", text="loss")
    assert watched["spark"].endswith("×")
    assert watched["values"][0]["number"] is None

    assert "Cell In[3]:18" in do(face, "next", sessions=group["sessions"])["text"]
    face.until(lambda face: now(face)["stopped"] == RANKS and now(face)["groups"][0]["line"] == 18)
    do(face, "continue")
    stopped(face, 0)
    cell = kernel.finish(request).ok()
    assert "any more" not in cell.stdout, "the view answers the question that is left"
    assert "gpus=3: 3" in cell.text


def test_a_prompt_and_a_face_take_turns(kernel: Debugged, face: FaceClient) -> None:
    needs_subshell(face)
    request = str(kernel.client.execute("t.slice(gpus=1).step.call_one(2).get()", allow_stdin=True))
    stopped(face, 1)
    do(face, "next")
    assert do(face, "command", text="p loss")["text"] == "0.5"
    talk = kernel.go_on(request, Talk(), "n", "c")
    assert "Cell In[3]:19" in talk.text
    assert talk.cell.text == "0"
    assert now(face.until(lambda face: now(face)["stopped"] == 0))["groups"] == []


def test_frames_are_looked_at_by_all_and_requests_that_mean_nothing_are_refused(
    kernel: Debugged, face: FaceClient
) -> None:
    needs_subshell(face)
    kernel.run("%break Trainer.loss on trainers gpus=0\nf = t.slice(gpus=0).forward.call_one([1, 2])").ok()
    group = stopped(face, 1)["groups"][0]
    assert [frame["function"] for frame in group["stack"]] == ["Trainer.forward", "Trainer.loss"]
    do(face, "up")
    face.until(lambda face: now(face)["groups"][0]["current"] == 0)
    source = now(face)["groups"][0]["source"]
    assert source["lines"][source["line"] - source["first"]].strip() == "return self.loss(scaled)"
    assert "scaled" in {each["name"] for each in do(face, "locals")["locals"]}
    do(face, "frame", frame=1)
    assert "values" in {each["name"] for each in do(face, "locals")["locals"]}
    (found,) = do(face, "breakpoints")["breakpoints"]
    assert found["where"] == "Trainer.loss"
    do(face, "clear", number=found["number"])
    assert "no 'jump'" in face.ask("debug", do="jump")["error"]
    assert "write an expression" in face.ask("debug", do="eval", text=" ")["error"]
    do(face, "continue")
    assert face.ask("debug", do="next")["error"] == "nothing is stopped"
    assert face.ask("debug", do="next", sessions=group["sessions"])["error"] == "the rank is not stopped any more"
    assert kernel.run("f.get()").ok().text


def test_the_frames_of_a_failure_are_opened_on_request(kernel: Debugged, face: FaceClient) -> None:
    needs_subshell(face)
    assert kernel.run("t.slice(gpus=2).forward.call_one([1, 2, 3]).get()").error is not None
    mesh = kernel.run("t._state.uid").text.strip("'")
    opened = face.ask("post_mortem", mesh=mesh, ranks=[2])["result"]
    assert "trainers gpus=2: its frames are open" in opened["text"]
    group = stopped(face, 1)["groups"][0]
    assert group["post_mortem"]
    assert "ZeroDivisionError" in group["reason"]
    do(face, "continue", sessions=opened["sessions"])
    stopped(face, 0)
    assert "no frames of this rank are kept" in face.ask("post_mortem", mesh=mesh, ranks=[1])["error"]
