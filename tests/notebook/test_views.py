"""The messages of the kernel to views over a comm, while cells run and block, as docs/protocol.md has them."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.conftest import ACTORS
from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


def open_failures(view: ViewClient) -> list[dict[str, Any]]:
    return [failure for failure in view.state["failures"].values() if failure["state"] == "open"]


@pytest.fixture
def view(nb: Notebook) -> Iterator[ViewClient]:
    client = ViewClient(nb)
    client.watch()
    client.until(lambda view: bool(view.mesh("a")))
    try:
        yield client
    finally:
        client.close()


def test_a_view_is_greeted_and_given_the_cluster_whole(view: ViewClient) -> None:
    hello = view.of("hello")[0]
    assert hello["protocol"] == 1
    mesh = view.state["meshes"][view.mesh("w")]
    assert (mesh["kind"], mesh["labels"], mesh["sizes"]) == ("procs", ["gpus"], [4])
    actors = view.state["meshes"][view.mesh("a")]
    assert (actors["class"], actors["on"]) == ("Worker", view.mesh("w"))
    assert all(view.rank("w", rank)["pid"] for rank in range(4))


def test_a_rank_is_seen_busy_while_its_cell_blocks_then_idle(nb: Notebook, view: ViewClient) -> None:
    request = nb.start("a.slice(gpus=1).work.call_one(3600).get()")
    view.until(lambda view: view.rank("a", 1)["state"] == "busy")
    assert view.rank("a", 1)["endpoint"] == "work"
    view.until(lambda view: view.rank("w", 1)["endpoint"] == "a.work")
    assert view.rank("a", 0)["state"] == "idle"
    if view.subshell is not None:  # else what a view asks for waits for the cell
        stacks = view.ask("stack", mesh=view.mesh("a"), ranks=[1])["result"]["stacks"]
        assert "in Worker.work" in stacks["1"]
        assert "time.sleep(0.02)" in stacks["1"]
        assert view.ask("interrupt", mesh=view.mesh("a"), ranks=[1])["ok"]
    else:
        nb.interrupt()
    assert nb.finish(request).error is not None
    if view.subshell is None:
        nb.run("%interrupt a").ok()  # Ctrl-C has ended the wait only
    view.until(lambda view: view.rank("a", 1)["state"] == "idle")


def test_without_subshells_views_update_and_clicks_wait_for_the_cell(nb: Notebook) -> None:
    view = ViewClient(nb, subshell=False)
    view.watch()
    view.until(lambda view: bool(view.mesh("a")))
    request = nb.start("a.work.call(3600).get()")
    view.until(lambda view: all(view.rank("a", rank)["state"] == "busy" for rank in range(4)))
    os.kill(view.rank("w", 3)["pid"], signal.SIGKILL)
    view.until(lambda view: view.rank("a", 3)["state"] == "failed")
    assert nb.finish(request).error is not None
    assert view.ask("interrupt", mesh=view.mesh("a"), ranks=[0, 1, 2])["ok"]
    assert view.ask("heal", mesh=view.mesh("w"))["ok"]
    view.until(lambda view: all(view.rank("a", rank)["state"] == "idle" for rank in range(4)))
    view.close()


def test_frames_of_a_failure_can_be_inspected_from_a_view(nb: Notebook, view: ViewClient) -> None:
    nb.run("a.slice(gpus=1).divide.broadcast(0)").ok()
    view.until(lambda view: any(row["kind"] == "actors" and row["ranks"] == [1] for row in open_failures(view)))
    [failure] = [row for row in open_failures(view) if row["ranks"] == [1]]
    assert "Cell In[" in failure["traceback"] or "ipykernel" in failure["traceback"]  # old IPython names no cells
    assert "return 1 / x" in failure["traceback"]  # the cell's own line
    target = {"mesh": failure["mesh"], "ranks": failure["ranks"]}
    sessions = view.ask("post_mortem", **target)["result"]["sessions"]
    assert view.ask("debug", sessions=sessions, do="command", text="p x")["result"]["text"] == "0"
    assert view.ask("debug", sessions=sessions, do="continue")["ok"]
    assert nb.run("a.slice(gpus=0).work.call_one().get()").text == "0"  # the rest goes on serving


@pytest.mark.slow
def test_an_unseen_failure_is_there_for_the_first_view_to_open() -> None:
    notebook = Notebook()
    try:
        notebook.run(ACTORS).ok()
        notebook.run("%mesh w gpus=2\na = w.spawn('a', Worker)").ok()
        assert notebook.run("a.slice(gpus=1).die.call_one().get()").error is not None
        assert "a, gpus=1 died: killed by signal 9" in notebook.run("%failures").text
    finally:
        notebook.close()


def test_a_killed_process_is_shown_failed_and_healed_on_request(nb: Notebook, view: ViewClient) -> None:
    os.kill(view.rank("w", 2)["pid"], signal.SIGKILL)
    view.until(lambda view: view.rank("w", 2)["state"] == view.rank("a", 2)["state"] == "failed")
    view.until(lambda view: "failure" in view.rank("a", 2) and view.rank("a", 2)["failure"] in view.state["failures"])
    number = view.rank("a", 2)["failure"]
    failure = view.state["failures"][number]
    assert failure["title"] == "a, gpus=2 died: killed by signal 9 (SIGKILL)"
    assert failure["ranks"] == [2]
    assert "heal_mesh(a)" in view.ask("report", failure=number)["result"]["text"]
    assert view.ask("heal", mesh=view.mesh("w"))["result"]["text"] == "healed 1 proc of w"
    view.until(lambda view: view.rank("w", 2)["state"] == view.rank("a", 2)["state"] == "idle")
    view.until(lambda view: view.state["failures"][number]["state"] == "healed")
    assert view.rank("a", 2)["incarnation"] > 0


def test_a_view_that_lost_its_position_gets_a_new_snapshot(view: ViewClient) -> None:
    before = len(view.of("snapshot"))
    view.watch()
    view.until(lambda view: len(view.of("snapshot")) > before)


def test_a_mesh_can_be_made_and_stopped_from_a_view(nb: Notebook, view: ViewClient) -> None:
    reply = view.ask("spawn", name="clicked", dims={"gpus": 1})
    assert reply["result"]["mesh"] == view.until(lambda view: bool(view.mesh("clicked"))).mesh("clicked")
    assert view.ask("variables")["result"]["variables"]["clicked"] == reply["result"]["mesh"]
    assert nb.run("clicked").ok().text == "<ProcMesh 'clicked' {gpus=1}>"
    assert view.ask("stop", mesh=reply["result"]["mesh"])["result"]["text"] == "stopped 1 proc of clicked"
    view.until(lambda view: view.mesh("clicked") == "")


def test_a_view_gets_only_the_lines_that_it_asks_for(nb: Notebook, view: ViewClient) -> None:
    uid = view.mesh("a")
    view.send(type="watch", topic="logs", id="L1", mesh=uid, ranks=[0, 1], text="loss")
    view.until(lambda view: any(m["id"] == "L1" for m in view.of("logs")))
    nb.run("a.work.call(say='the loss is small').get(); a.work.call(say='something else').get()").ok()

    def lines(view: ViewClient) -> list[tuple[int, str]]:
        return sorted((line[0], line[3]) for m in view.of("logs") for line in m["lines"])

    view.until(lambda view: len(lines(view)) >= 2)
    assert lines(view) == [(0, "the loss is small"), (1, "the loss is small")]
    newest = view.ask("logs", mesh=uid, ranks=[3], lines=1)["result"]["lines"]
    assert newest == {"3": ["something else"]}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"verb": "fly"}, "knows no request 'fly'"),
        ({"verb": "heal", "mesh": "nowhere"}, "there is no mesh 'nowhere' any more"),
        ({"verb": "spawn", "name": "not a name", "dims": {"gpus": 1}}, "cannot be the name of a variable"),
        ({"verb": "spawn", "name": "w2", "dims": {"gpus": "many"}}, "dims must be sizes"),
    ],
)
def test_wrong_requests_are_answered_with_what_is_wrong(view: ViewClient, wrong: dict[str, object], error: str) -> None:
    answer = view.ask(**wrong)  # type: ignore[arg-type]
    assert not answer["ok"]
    assert error in answer["error"]


@pytest.mark.slow
def test_a_view_learns_of_a_new_engine_after_a_shutdown() -> None:
    notebook = Notebook()
    try:
        notebook.run("%mesh w gpus=1").ok()
        view = ViewClient(notebook)
        view.watch()
        view.until(lambda view: bool(view.mesh("w")))
        notebook.run("from monarch.actor import shutdown_context; shutdown_context().get()").ok()
        notebook.run("%mesh v gpus=1").ok()
        notebook.run("0").ok()
        view.until(lambda view: bool(view.mesh("v")) and not view.mesh("w"))
        assert len(view.of("hello")) == 2
        view.close()
    finally:
        notebook.close()


def test_transfers_between_processes_are_in_the_state_of_a_watching_view(nb: Notebook, view: ViewClient) -> None:
    view.send(type="watch", topic="transfers", id="t1")
    nb.run(
        "from monarch.rdma import RDMABuffer\n"
        "def offer():\n    global offered\n    offered = RDMABuffer(bytearray(2_000_000))\n    return offered\n"
        "buffer = w.slice(gpus=1).run(offer).get().item()\n"
        "buffer.read_into(bytearray(2_000_000)).get()"
    ).ok()

    def moved(view: ViewClient) -> bool:
        ways = [row for row in view.state["transfers"].values() if row["mover"]]
        return [(row["from"], row["to"], row["bytes"]) for row in ways] == [("w gpus=1", "controller", 2_000_000)]

    view.until(moved)
    text = nb.run("%transfers").ok().text
    assert "w gpus=1" in text
    assert "cross-memory" in text
    nb.run("buffer.drop().get()").ok()
    view.until(lambda view: not [row for row in view.state["transfers"].values() if not row["mover"]])


def test_ranks_are_killed_and_healed_from_a_view(nb: Notebook, view: ViewClient) -> None:
    text = view.ask("kill", mesh=view.mesh("w"), ranks=[1, 2])["result"]["text"]
    assert text == "killed 2 procs of w: %heal w starts what is lost again"
    view.until(lambda view: view.rank("w", 1)["state"] == view.rank("a", 2)["state"] == "failed")
    assert view.ask("heal", mesh=view.mesh("w"))["result"]["text"] == "healed 2 procs of w"
    assert nb.run("%kill w gpus=1,2").ok().stdout.strip() == text
    again = view.ask("heal", mesh=view.mesh("w"), ranks=[1, 2], kill=True)
    assert again["result"]["text"] == "killed and healed 2 procs of w"
    assert len(nb.run("a.work.call(say='').get()").ok().text) > 0


def test_a_breakpoint_is_set_on_some_ranks_from_a_view(nb: Notebook, view: ViewClient) -> None:
    reply = view.ask("debug", do="break", mesh=view.mesh("a"), ranks=[2], where="Worker.work")["result"]
    assert reply["text"].startswith("breakpoint ")
    assert " on a" in reply["text"]
    view.ask("debug", do="clear", number=reply["breakpoint"]["number"])


def test_hosts_come_and_go_by_requests_where_a_mesh_can_grow(nb: Notebook, view: ViewClient) -> None:
    refused = view.ask("resize", mesh=view.mesh("w"), label="hosts", by=1)
    assert not refused["ok"]
    assert "w" in refused["error"]
    assert "mesh of actors" in view.ask("resize", mesh=view.mesh("a"), label="hosts", by=1)["error"]


def test_a_mesh_that_was_left_is_attached_or_ended_from_views(nb: Notebook, view: ViewClient) -> None:
    nb.run("%mesh away gpus=2\n%detach away --lease 5m").ok()
    (detached,) = [mesh for mesh in view.ask("left")["result"]["meshes"] if mesh["name"] == "away"]
    assert (detached["held"], "away {gpus=2}" in detached["text"]) == (False, True)
    assert view.ask("attach", uid=detached["uid"])["result"]["text"]
    assert nb.run("len(away)").ok().text == "2"
    assert not [mesh for mesh in view.ask("left")["result"]["meshes"] if mesh["name"] == "away"]
    nb.run("%detach away --lease 5m").ok()
    assert view.ask("end", uid=detached["uid"])["result"]["text"] == "stopped away: 2 procs"
    assert not view.ask("attach", uid=detached["uid"])["ok"]


def test_a_view_learns_which_jobs_can_be_used_here(nb: Notebook, view: ViewClient) -> None:
    engines = {engine["name"]: engine["why"] for engine in view.ask("places")["result"]["places"]}
    assert {"slurm", "ssh", "kubernetes"} <= set(engines)
    assert "local" not in engines  # this machine
    assert engines["slurm"] in ("", "there is no sbatch here")


def test_a_page_gets_the_sections_that_it_asks_for_alone(nb: Notebook) -> None:
    client, part = ViewClient(nb), ViewClient(nb)
    try:
        client.send(type="watch", topic="cluster", sections=[])
        part.send(type="watch", topic="cluster", sections=["meshes", "hosts"])
        part.until(lambda view: bool(view.state.get("meshes")))
        assert part.state.keys() <= {"meshes", "hosts"}
        nb.run("%mesh sections gpus=1").ok()
        part.until(lambda view: any(mesh["name"] == "sections" for mesh in view.state["meshes"].values()))
        nb.run("%stop sections").ok()
        part.until(lambda view: any(mesh.get("stopped") for mesh in view.state["meshes"].values()))
        assert part.state.keys() <= {"meshes", "hosts"}
        client.send(type="alive")
        client.until(lambda view: bool(view.of("alive")))
        assert [message["state"] for message in client.of("snapshot")] == [{}]
        assert client.of("delta") == []
        client.send(type="watch", topic="cluster")
        client.until(lambda view: "failures" in view.state)
    finally:
        client.close()
        part.close()
