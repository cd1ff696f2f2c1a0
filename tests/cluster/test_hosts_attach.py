"""Hosts that users started: attached with their key, refused with a reason, and alive afterwards."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import connect
from monarch_nb._package import __version__
from monarch_nb.actor import ProcMesh, this_host
from monarch_nb.connect import AttachError, attach_hosts
from monarch_nb.host import protocol as p
from monarch_nb.transport import Keys, Node, Parcel, TrustError
from monarch_nb.wire import REPLY, Header, Kind, encode_body
from tests.cluster.hosts_tools import SOON, Caller, HostProcess, Member, apart, key, nothing_left, user_hosts
from tests.polling import until
from tests.ports import free_port
from tests.processes import alive

pytestmark = pytest.mark.timeout(120)
__all__ = ["apart", "key", "nothing_left"]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[list[HostProcess]]:
    with user_hosts(tmp_path_factory.mktemp("agents"), 2, key=key) as processes:
        yield processes
        connect.shutdown()


@pytest.fixture(scope="module")
def pair(agents: list[HostProcess], key: Path) -> Any:
    return attach_hosts([agent.endpoint for agent in agents], key=key)


@pytest.fixture(scope="module")
def four(pair: Any) -> ProcMesh:
    procs = pair.spawn_procs(per_host={"slots": 2}, name="four")
    procs.initialized.get(60)
    return procs


def test_procs_on_attached_hosts_are_a_mesh_like_any_other(four: ProcMesh) -> None:
    members = four.spawn("members", Member)
    answers = members.where.call().get(SOON)
    assert answers.sizes == {"hosts": 2, "slots": 2}
    assert [rank for rank, _ in answers.values()] == [0, 1, 2, 3]
    assert members.slice(hosts=1, slots=0).where.call_one().get(SOON)[1] == answers.item(hosts=1, slots=0)[1]
    members.stop().get(SOON)


def test_procs_on_different_hosts_call_each_other(four: ProcMesh) -> None:
    members, callers = four.spawn("members", Member), four.spawn("callers", Caller)
    expected = members.where.call().get(SOON).values()
    assert list(callers.call.call(members).get(SOON).values()) == [expected] * 4
    callers.tell.call(members.slice(hosts=1), 100, "all").get(SOON)
    until(lambda: members.slice(hosts=1).count.call("all").get(SOON).values() == [400, 400])


def test_attached_hosts_and_this_one_reach_each_other(four: ProcMesh) -> None:
    procs = this_host().spawn_procs(name="near")
    local, attached = procs.spawn("here", Member), four.spawn("there", Member)
    expected = local.where.call().get(SOON).values()
    assert four.spawn("out", Caller).slice(hosts=1, slots=1).call.call_one(local).get(SOON) == expected
    assert procs.spawn("in", Caller).call.call_one(attached).get(SOON) == attached.where.call().get(SOON).values()
    procs.stop().get(SOON)


def test_attaching_again_gives_the_same_hosts(pair: Any, agents: list[HostProcess], key: Path) -> None:
    hosts = attach_hosts([agent.endpoint for agent in reversed(agents)], key=Keys.load(key), name="again")
    assert hosts.host_ids == tuple(reversed(pair.host_ids))
    assert hosts.initialized.get(SOON) is True


def test_stop_ends_the_procs_and_keeps_the_hosts(agents: list[HostProcess], key: Path, four: ProcMesh) -> None:
    hosts = attach_hosts([agents[0].endpoint], key=key)
    procs = hosts.spawn_procs(name="short")
    [(_, pid)] = procs.spawn("members", Member).where.call().get(SOON).values()
    hosts.stop().get(SOON)
    until(lambda: not alive(pid))
    with pytest.raises(RuntimeError, match="stopped"):
        procs.spawn("more", Member)
    [(_, next_pid)] = hosts.spawn_procs(name="next").spawn("members", Member).where.call().get(SOON).values()
    assert alive(next_pid)


def test_hosts_survive_their_controller_and_its_procs_do_not(agents: list[HostProcess], key: Path) -> None:
    procs = attach_hosts([agent.endpoint for agent in agents], key=key).spawn_procs(name="left")
    pids = [pid for _, pid in procs.spawn("members", Member).where.call().get(SOON).values()]
    connect.shutdown()
    until(lambda: not any(map(alive, pids)), 30)  # at once, not when the lease is over
    assert all(agent.process.poll() is None for agent in agents)
    procs = attach_hosts([agent.endpoint for agent in agents], key=key).spawn_procs(name="anew")
    assert len(procs.spawn("members", Member).where.call().get(SOON)) == 2


def test_shutdown_ends_attached_hosts(tmp_path: Path, key: Path) -> None:
    with user_hosts(tmp_path, 1, key=key) as [agent]:
        hosts = attach_hosts([agent.endpoint], key=key)
        hosts.spawn_procs(name="short").initialized.get(30)
        hosts.shutdown().get(SOON)
        assert agent.process.wait(SOON) == 0
        assert not agent.run_folder.exists()
        with pytest.raises(RuntimeError, match="shut down"):
            hosts.spawn_procs(name="late")


# refused attaches


def nobody() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_a_tcp_endpoint_without_a_key_is_refused_with_the_remedy() -> None:
    for endpoint in (nobody(), "tcp://10.0.0.1:22222"):
        with pytest.raises(TrustError, match=r"needs a key.*Keys\.load_or_create"):
            attach_hosts([endpoint])
    with pytest.raises(TrustError, match=r"only 127\.0\.0\.1"):
        attach_hosts(["tcp://10.0.0.1:22222"], insecure_loopback=True)


def test_a_key_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match=r"no key file .*job\.key.* copy that file"):
        attach_hosts([nobody()], key=tmp_path / "job.key")


@pytest.mark.parametrize("endpoint", ["node7", "tcp://node7", "tcp://:5", "tcp://node7:http", "http://node7:80"])
def test_a_text_that_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="not an address of a host"):
        attach_hosts([endpoint], key=Keys.create())


def test_nobody_listening_is_told_within_the_bound(key: Path) -> None:
    endpoint = nobody()
    with pytest.raises(AttachError, match=rf"nobody listens at {endpoint}.*monarch-nb agent"):
        attach_hosts([endpoint], key=key, timeout=0.5)


def test_an_agent_that_starts_late_is_waited_for(tmp_path: Path, key: Path) -> None:
    endpoint = nobody()
    meshes: list[Any] = []
    waiter = threading.Thread(target=lambda: meshes.append(attach_hosts([endpoint], key=key, timeout=SOON)))
    waiter.start()
    agent = HostProcess(tmp_path, key=key, tcp=endpoint)
    waiter.join(SOON)
    assert meshes[0].sizes == {"hosts": 1}
    meshes[0].shutdown().get(SOON)
    agent.close()


@contextlib.contextmanager
def listener(says: bytes) -> Iterator[str]:
    """A foreign server that sends bytes and stays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.sendall(says)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@pytest.mark.parametrize(
    ("says", "text"),
    [(b"SSH-2.0-OpenSSH_9.6\r\n", "it says b'SSH-2.0"), pytest.param(b"", "says nothing", marks=pytest.mark.slow)],
)
def test_a_listener_of_another_kind_is_told(key: Path, says: bytes, text: str) -> None:
    with listener(says) as endpoint, pytest.raises(AttachError) as caught:
        attach_hosts([endpoint], key=key, timeout=2.0)
    assert text in str(caught.value)
    assert endpoint in str(caught.value)
    assert "not a monarch-nb host agent" in str(caught.value)


@pytest.mark.slow
def test_a_wrong_key_is_told_and_the_right_one_works_afterwards(tmp_path: Path, key: Path) -> None:
    with user_hosts(tmp_path, 1, key=key) as [agent]:
        with pytest.raises(AttachError, match=rf"{agent.endpoint} does not accept this key: pass the very file"):
            attach_hosts([agent.endpoint], key=Keys.create())
        assert attach_hosts([agent.endpoint], key=key).initialized.get(SOON) is True
        connect.shutdown()


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, key: Path) -> None:
    wrong = nobody()
    with user_hosts(tmp_path, 1, key=key) as [agent], listener(b"hello there") as stranger:
        with pytest.raises(AttachError) as caught:
            attach_hosts([agent.endpoint, wrong, stranger], key=key, timeout=3.0)  # the agent must answer in time
        assert list(caught.value.errors) == [wrong, stranger]
        assert str(caught.value).startswith("2 of 3 hosts cannot be attached:")
        with pytest.raises(AttachError, match="is attached already"):
            attach_hosts([agent.endpoint, agent.endpoint], key=key)


def test_an_agent_with_the_name_of_a_living_host_is_refused(
    agents: list[HostProcess], tmp_path: Path, key: Path, apart: Path
) -> None:
    hosts = attach_hosts([agent.endpoint for agent in agents], key=key)  # `pair` is of an earlier cluster
    members = hosts.spawn_procs(name="members").spawn("members", Member)
    before = members.where.call().get(SOON).values()
    with user_hosts(tmp_path, 1, "--host", agents[0].host, "--run-folder", str(apart), key=key, shutdown=False) as [
        twin
    ]:
        with pytest.raises(AttachError, match=f"calls itself host {agents[0].host}, as {agents[0].endpoint} does"):
            attach_hosts([twin.endpoint], key=key)
        assert members.where.call().get(SOON).values() == before
    members.stop().get(SOON)


@pytest.mark.slow
def test_keys_on_one_side_only_are_told(tmp_path: Path, key: Path) -> None:
    with user_hosts(tmp_path, 1, "--insecure-loopback") as [keyless], user_hosts(tmp_path, 1, key=key) as [keyed]:
        with pytest.raises(AttachError, match=r"was started without a key.*--key FILE"):
            attach_hosts([keyless.endpoint], key=key)
        with pytest.raises(AttachError, match="needs a key: pass key="):
            attach_hosts([keyed.endpoint], insecure_loopback=True)
        procs = attach_hosts([keyless.endpoint], insecure_loopback=True).spawn_procs(name="open")
        assert len(procs.spawn("members", Member).where.call().get(SOON)) == 1
        connect.shutdown()


@pytest.mark.parametrize(
    ("python", "version", "pattern"),
    [("3.99.1", __version__, r"runs Python 3\.99\.1, this process 3\."), ("", "0.0.9", r"runs monarch-nb 0\.0\.9")],
)
def test_another_python_or_version_is_refused_by_name(key: Path, python: str, version: str, pattern: str) -> None:
    import sys

    state = p.HostState(host="hold", pid=1, procs=(), python=python or sys.version.split()[0], version=version)

    def answer(header: Header, parcel: Parcel) -> None:
        reply = Header(Kind.CONTROL, header.src, node.address, method=REPLY, port=header.port)
        node.send(reply, Parcel([encode_body(state)]), lane=1)

    node = Node("hold/agent", run_folders={}, handler=answer, on_link_failed=lambda *_: None, keys=Keys.load(key),
                tcp_bind="tcp://127.0.0.1:*")  # fmt: skip
    node.start()
    try:
        with pytest.raises(AttachError, match=pattern) as caught:
            attach_hosts([str(node.tcp_endpoint)], key=key)
        assert str(node.tcp_endpoint) in str(caught.value)
    finally:
        node.close(0)
