"""What the kernel tells faces over a comm, while cells run and block; docs/protocol.md is what is held to."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.conftest import ACTORS
from tests.notebook.face_client import FaceClient
from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)


def open_failures(face: FaceClient) -> list[dict[str, Any]]:
    return [one for one in face.state["failures"].values() if one["state"] == "open"]


@pytest.fixture
def face(nb: Notebook) -> Iterator[FaceClient]:
    made = FaceClient(nb)
    made.watch()
    made.until(lambda face: bool(face.mesh("a")))
    try:
        yield made
    finally:
        made.close()


def test_a_face_is_greeted_and_given_the_cluster_whole(face: FaceClient) -> None:
    hello = face.of("hello")[0]
    assert hello["protocol"] == 1
    mesh = face.state["meshes"][face.mesh("w")]
    assert (mesh["kind"], mesh["labels"], mesh["sizes"]) == ("procs", ["gpus"], [4])
    actors = face.state["meshes"][face.mesh("a")]
    assert (actors["class"], actors["on"]) == ("Worker", face.mesh("w"))
    assert all(face.rank("w", rank)["pid"] for rank in range(4))


def test_a_rank_is_seen_busy_while_the_cell_that_waits_for_it_blocks_and_idle_after(
    nb: Notebook, face: FaceClient
) -> None:
    request = nb.start("a.slice(gpus=1).work.call_one(3600).get()")
    face.until(lambda face: face.rank("a", 1)["state"] == "busy")
    assert face.rank("a", 1)["endpoint"] == "work"
    face.until(lambda face: face.rank("w", 1)["endpoint"] == "a.work")
    assert face.rank("a", 0)["state"] == "idle"
    if face.subshell is not None:  # else what a face asks for waits for the cell
        stacks = face.ask("stack", mesh=face.mesh("a"), ranks=[1])["result"]["stacks"]
        assert "in Worker.work" in stacks["1"]
        assert "time.sleep(0.02)" in stacks["1"]
        assert face.ask("interrupt", mesh=face.mesh("a"), ranks=[1])["ok"]
    else:
        nb.interrupt()
    assert nb.finish(request).error is not None
    if face.subshell is None:
        nb.run("%interrupt a").ok()  # Ctrl-C has ended the wait only
    face.until(lambda face: face.rank("a", 1)["state"] == "idle")


def test_a_front_end_without_subshells_sees_the_same_and_its_clicks_wait_for_the_cell(nb: Notebook) -> None:
    face = FaceClient(nb, subshell=False)
    face.watch()
    face.until(lambda face: bool(face.mesh("a")))
    request = nb.start("a.work.call(3600).get()")
    face.until(lambda face: all(face.rank("a", rank)["state"] == "busy" for rank in range(4)))
    os.kill(face.rank("w", 3)["pid"], signal.SIGKILL)
    face.until(lambda face: face.rank("a", 3)["state"] == "failed")
    assert nb.finish(request).error is not None
    assert face.ask("interrupt", mesh=face.mesh("a"), ranks=[0, 1, 2])["ok"]
    assert face.ask("heal", mesh=face.mesh("w"))["ok"]
    face.until(lambda face: all(face.rank("a", rank)["state"] == "idle" for rank in range(4)))
    face.close()


def test_the_frames_of_a_failure_can_be_looked_into_from_a_face(nb: Notebook, face: FaceClient) -> None:
    nb.run("a.slice(gpus=1).divide.broadcast(0)").ok()
    face.until(lambda face: any(one["kind"] == "actors" and one["ranks"] == [1] for one in open_failures(face)))
    [failure] = [one for one in open_failures(face) if one["ranks"] == [1]]
    assert "Cell In[" in failure["traceback"] or "ipykernel" in failure["traceback"]  # old IPython names no cells
    assert "return 1 / x" in failure["traceback"]  # the cell's own line
    asked = {"mesh": failure["mesh"], "ranks": failure["ranks"]}
    sessions = face.ask("post_mortem", **asked)["result"]["sessions"]
    assert face.ask("debug", sessions=sessions, do="command", text="p x")["result"]["text"] == "0"
    assert face.ask("debug", sessions=sessions, do="continue")["ok"]
    assert nb.run("a.slice(gpus=0).work.call_one().get()").text == "0"  # the rest goes on serving


def test_a_failure_nobody_has_looked_at_is_there_for_the_first_face_that_comes() -> None:
    notebook = Notebook()
    try:
        notebook.run(ACTORS).ok()
        notebook.run("%mesh w gpus=2\na = w.spawn('a', Worker)").ok()
        assert notebook.run("a.slice(gpus=1).die.call_one().get()").error is not None
        assert "a, gpus=1 died: killed by signal 9" in notebook.run("%failures").text
    finally:
        notebook.close()


def test_a_killed_process_is_seen_failed_with_its_failure_and_healed_on_request(nb: Notebook, face: FaceClient) -> None:
    os.kill(face.rank("w", 2)["pid"], signal.SIGKILL)
    face.until(lambda face: face.rank("w", 2)["state"] == face.rank("a", 2)["state"] == "failed")
    face.until(lambda face: "failure" in face.rank("a", 2) and face.rank("a", 2)["failure"] in face.state["failures"])
    number = face.rank("a", 2)["failure"]
    failure = face.state["failures"][number]
    assert failure["title"] == "a, gpus=2 died: killed by signal 9 (SIGKILL)"
    assert failure["ranks"] == [2]
    assert "heal_mesh(a)" in face.ask("report", failure=number)["result"]["text"]
    assert face.ask("heal", mesh=face.mesh("w"))["result"]["text"] == "healed 1 proc of w"
    face.until(lambda face: face.rank("w", 2)["state"] == face.rank("a", 2)["state"] == "idle")
    face.until(lambda face: face.state["failures"][number]["state"] == "healed")
    assert face.rank("a", 2)["life"] > 0


def test_a_face_that_has_lost_its_place_is_given_a_new_snapshot(face: FaceClient) -> None:
    before = len(face.of("snapshot"))
    face.watch()
    face.until(lambda face: len(face.of("snapshot")) > before)


def test_a_mesh_can_be_made_and_stopped_from_a_face(nb: Notebook, face: FaceClient) -> None:
    made = face.ask("spawn", name="clicked", dims={"gpus": 1})
    assert made["result"]["mesh"] == face.until(lambda face: bool(face.mesh("clicked"))).mesh("clicked")
    assert face.ask("variables")["result"]["variables"]["clicked"] == made["result"]["mesh"]
    assert nb.run("clicked").ok().text == "<ProcMesh 'clicked' {gpus=1}>"
    assert face.ask("stop", mesh=made["result"]["mesh"])["result"]["text"] == "stopped 1 proc of clicked"
    face.until(lambda face: face.mesh("clicked") == "")


def test_lines_come_to_a_face_that_watches_them_and_only_those_it_wants(nb: Notebook, face: FaceClient) -> None:
    uid = face.mesh("a")
    face.send(type="watch", topic="logs", id="L1", mesh=uid, ranks=[0, 1], text="loss")
    face.until(lambda face: any(m["id"] == "L1" for m in face.of("logs")))
    nb.run("a.work.call(say='the loss is small').get(); a.work.call(say='something else').get()").ok()

    def lines(face: FaceClient) -> list[tuple[int, str]]:
        return sorted((line[0], line[3]) for m in face.of("logs") for line in m["lines"])

    face.until(lambda face: len(lines(face)) >= 2)
    assert lines(face) == [(0, "the loss is small"), (1, "the loss is small")]
    kept = face.ask("logs", mesh=uid, ranks=[3], lines=1)["result"]["lines"]
    assert kept == {"3": ["something else"]}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"verb": "fly"}, "knows no request 'fly'"),
        ({"verb": "heal", "mesh": "nowhere"}, "there is no mesh 'nowhere' any more"),
        ({"verb": "spawn", "name": "not a name", "dims": {"gpus": 1}}, "cannot be the name of a variable"),
        ({"verb": "spawn", "name": "w2", "dims": {"gpus": "many"}}, "dims must be sizes"),
    ],
)
def test_wrong_requests_are_answered_with_what_is_wrong(face: FaceClient, wrong: dict[str, object], told: str) -> None:
    answer = face.ask(**wrong)  # type: ignore[arg-type]
    assert not answer["ok"]
    assert told in answer["error"]


def test_a_face_hears_of_a_new_engine_after_the_cluster_was_shut_down() -> None:
    notebook = Notebook()
    try:
        notebook.run("%mesh w gpus=1").ok()
        face = FaceClient(notebook)
        face.watch()
        face.until(lambda face: bool(face.mesh("w")))
        notebook.run("from monarch.actor import shutdown_context; shutdown_context().get()").ok()
        notebook.run("%mesh v gpus=1").ok()
        notebook.run("0").ok()
        face.until(lambda face: bool(face.mesh("v")) and not face.mesh("w"))
        assert len(face.of("hello")) == 2
        face.close()
    finally:
        notebook.close()
