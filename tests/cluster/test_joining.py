"""Hosts that nobody can dial: they dial the controller."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import connect
from monarch_nb.actor import MeshFailure, SupervisionError, accept_hosts, attach_hosts, shutdown_context, this_host
from monarch_nb.connect import AttachError
from monarch_nb.connect import hosts as joining
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host.launch import command
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Keys, TrustError
from tests.cluster.hosts_tools import SOON, Caller, HostProcess, Member, apart, faults, key, nothing_left, user_hosts
from tests.polling import until
from tests.ports import free_port
from tests.processes import alive
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(120)
__all__ = ["apart", "faults", "key", "nothing_left"]


class DiallingHost(HostProcess):
    """`python -m monarch_nb.host --dial`, as a user starts it."""

    def __init__(self, folder: Path, endpoint: str, key: Path, *options: str) -> None:
        self.errors = folder / f"agent-{os.urandom(4).hex()}.log"
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(
                command("monarch_nb.host.agent", "--dial", endpoint, "--key", str(key), "--keep", *options),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert self.process.stdout is not None
        with self.process.stdout as out:
            ready = json.loads(out.readline())
        self.host = ready["host"]
        self.run_folder = Path(ready["run_folder"])
        assert ready["endpoint"] is None, "it listens on no port"


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def endpoint() -> str:
    return free_endpoint()


@pytest.fixture
def address() -> str:
    """An endpoint that `diallers` do not call."""
    return free_endpoint()


@pytest.fixture(scope="module")
def diallers(tmp_path_factory: pytest.TempPathFactory, key: Path, endpoint: str) -> Iterator[list[DiallingHost]]:
    """Two hosts that dial until a controller answers."""
    folder = tmp_path_factory.mktemp("agents")
    hosts = [DiallingHost(folder, endpoint, key) for _ in range(2)]
    yield hosts
    connect.shutdown()
    for host in hosts:
        host.close()


@pytest.fixture
def pair(diallers: list[DiallingHost], endpoint: str, key: Path) -> Iterator[Any]:
    yield accept_hosts(2, at=endpoint, key=key, timeout=SOON)
    connect.shutdown()


@pytest.mark.slow
def test_hosts_that_dial_are_a_mesh_like_any_other(
    pair: Any, diallers: list[DiallingHost], tmp_path: Path, key: Path
) -> None:
    assert set(pair.host_ids) == {dialler.host for dialler in diallers}
    assert pair.initialized.get(SOON) is True
    procs = pair.spawn_procs(per_host={"slots": 2}, name="far")
    members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
    expected = members.where.call().get(SOON).values()
    assert [rank for rank, _ in expected] == [0, 1, 2, 3]
    assert list(callers.call.call(members).get(SOON).values()) == [expected] * 4
    data = bytes(3_000_000)
    assert list(members.length.call(data).get(SOON).values()) == [len(data)] * 4
    local = this_host().spawn_procs(name="near")
    assert local.spawn("in", Caller).call.call_one(members).get(SOON) == expected
    targets = local.spawn("here", Member)
    assert callers.slice(hosts=1, slots=0).call.call_one(targets).get(SOON) == targets.where.call().get(SOON).values()
    with user_hosts(tmp_path, 1, key=key, shutdown=False) as [agent]:
        attached = attach_hosts([agent.endpoint], key=key)
        more_callers = attached.spawn_procs(name="there").spawn("there", Caller)
        assert list(more_callers.call.call(members).get(SOON).values()) == [expected]
        attached.shutdown().get(SOON)
    local.stop().get(SOON)


@pytest.mark.slow
def test_procs_end_with_the_controller_and_hosts_join_the_next(pair: Any, endpoint: str, key: Path) -> None:
    first = pair.spawn_procs(name="first").spawn("members", Member).where.call().get(SOON).values()
    shutdown_context().get(SOON)
    until(lambda: not any(alive(pid) for _, pid in first))
    hosts = accept_hosts(2, at=endpoint, key=key, timeout=SOON)
    assert set(hosts.host_ids) == set(pair.host_ids)
    assert len(hosts.spawn_procs(name="next").spawn("members", Member).where.call().get(SOON)) == 2


@pytest.mark.slow
def test_a_rank_dying_on_a_joined_host_is_reported_and_healed(pair: Any, faults: list[MeshFailure]) -> None:
    members = pair.spawn_procs(name="far").spawn("members", Member)
    pids = [pid for _, pid in members.where.call().get(SOON).values()]
    nap = members.nap.call(300, 1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        nap.get(SOON)
    heal_mesh(members)
    assert members.where.call().get(SOON).values()[0][1] == pids[0]


@pytest.mark.slow
def test_a_connection_that_breaks_is_dialled_again_and_loses_nothing(tmp_path: Path, key: Path, address: str) -> None:
    proxy = Proxy(address)
    dialler = DiallingHost(tmp_path, proxy.endpoint, key)
    try:
        members = accept_hosts(1, at=address, key=key, timeout=SOON).spawn_procs(name="far").spawn("members", Member)
        members.where.call().get(SOON)
        for number in range(200):
            if number == 100:
                proxy.reset()
            members.note.broadcast(number)
        assert list(members.in_order.call("root", list(range(200))).get(SOON).values()) == [True]
    finally:
        connect.shutdown()
        proxy.close()
        dialler.close()


def test_a_host_that_does_not_redial_is_lost_until_it_returns(
    tmp_path: Path, key: Path, address: str, faults: list[MeshFailure]
) -> None:
    proxy = Proxy(address)
    dialler = DiallingHost(tmp_path, proxy.endpoint, key)
    try:
        hosts = accept_hosts(1, at=address, key=key, lease=1.0, timeout=SOON)
        members = hosts.spawn_procs(name="far").spawn("members", Member)
        [(_, pid)] = members.where.call().get(SOON).values()
        nap = members.nap.call(300, 0)
        proxy.cut()
        with pytest.raises(SupervisionError, match=r"closed its connection and has not dialled again for 1 s"):
            nap.get(SOON)
        until(lambda: not alive(pid))
        proxy.mend()
        until(lambda: not current_runtime().part(HostRoutes).attached[dialler.host].lost)
        heal_mesh(members)
        assert len(members.where.call().get(SOON)) == 1
        hosts.shutdown().get(SOON)
        assert dialler.process.wait(SOON) == 0
    finally:
        connect.shutdown()
        proxy.close()
        dialler.close()


@pytest.mark.slow
def test_two_agents_of_one_name_have_it_one_after_the_other(
    tmp_path: Path, key: Path, address: str, faults: list[MeshFailure], apart: Path
) -> None:
    first = DiallingHost(tmp_path, address, key, "--host", "h0a0a0a")
    dialled = [first]
    try:
        hosts = accept_hosts(1, at=address, key=key, timeout=SOON)
        members = hosts.spawn_procs(name="far").spawn("members", Member)
        before = members.where.call().get(SOON).values()
        second = DiallingHost(tmp_path, address, key, "--host", "h0a0a0a", "--run-folder", str(apart))
        dialled.append(second)
        message = f"host h0a0a0a has joined by another agent, process {first.process.pid}: this one, process"
        until(lambda: message in second.errors.read_text())
        with pytest.raises(AttachError, match="an id of its own"):
            accept_hosts(1, at=address, key=key, timeout=0.1)
        assert members.where.call().get(SOON).values() == before, "nothing happens to the first"
        host = current_runtime().part(HostRoutes).attached["h0a0a0a"]
        incarnation = host.incarnation
        first.process.kill()
        until(lambda: host.incarnation != incarnation and not host.lost)
        assert faults[-1].mesh_name == "members"
        heal_mesh(members)
        assert members.where.call().get(SOON).values() != before
    finally:
        connect.shutdown()
        for dialler in dialled:
            dialler.close()


def test_a_host_that_died_after_it_joined_costs_no_other_host(
    tmp_path: Path, key: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_JOIN_S", 600.0)  # more than the test may take: `timeout` limits the wait
    diallers = {dialler.host: dialler for dialler in (DiallingHost(tmp_path, address, key) for _ in range(3))}
    try:
        accept_hosts(1, at=address, key=key, timeout=SOON)
        reception = joining._reception
        assert reception is not None
        until(lambda: len(reception._new) == 2)
        dead, living = reception._new
        diallers[dead].process.kill()
        with pytest.raises(AttachError, match=rf"host {dead} joined, and has not answered(?s:.*)1 of 2 hosts joined"):
            accept_hosts(2, at=address, key=key, timeout=0.5)
        assert accept_hosts(1, at=address, key=key, timeout=SOON).host_ids == (living,)
    finally:
        connect.shutdown()
        for dialler in diallers.values():
            dialler.close()


def test_hosts_that_did_not_join_are_reported_with_the_remedy(key: Path, address: str) -> None:
    with pytest.raises(TrustError, match="needs a key"):
        accept_hosts(1, at=address)
    with pytest.raises(AttachError, match=r"0 of 1 host joined .*--dial tcp://HERE:\d+"):
        accept_hosts(1, at=address, key=key, timeout=0.2)
    with pytest.raises(ValueError, match="already"):
        accept_hosts(1, at="tcp://127.0.0.1:1", key=key)
    with pytest.raises(ValueError, match="at least 1"):
        accept_hosts(0, at=address, key=key)
    connect.shutdown()


@pytest.mark.slow
def test_a_host_with_another_key_does_not_get_in(key: Path, address: str, tmp_path: Path) -> None:
    wrong_key = tmp_path / "other.key"
    Keys.load_or_create(wrong_key)
    dialler = DiallingHost(tmp_path, address, wrong_key)
    try:
        with pytest.raises(AttachError, match="0 of 1"):
            accept_hosts(1, at=address, key=key, timeout=1.5)
        until(lambda: "does not accept this key" in dialler.errors.read_text())
    finally:
        connect.shutdown()
        dialler.close()
