"""A client outside of a cluster: it reaches one worker, and the others through that one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    attach,
    attach_hosts,
    attach_to_workers,
    endpoint,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_nb.compat.worker_loops import start_worker_loop_until_shutdown
from monarch_nb.config import configured
from monarch_nb.connect import AttachError, remote_host, shutdown
from monarch_nb.exceptions import TrustError
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.transport import Keys
from tests.cluster.hosts_tools import SOON, Caller, HostProcess, Member, faults, key, nothing_left, user_hosts
from tests.cluster.worker_tools import short_folder, where, workers_at
from tests.polling import until
from tests.processes import alive
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(120)
__all__ = ["faults", "key", "nothing_left"]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[list[HostProcess]]:
    with user_hosts(tmp_path_factory.mktemp("standing"), 3, key=key) as agents:
        yield agents


@pytest.fixture
def cluster(standing: list[HostProcess], key: Path) -> Iterator[list[HostProcess]]:
    """Three hosts, of which this process dials the first alone."""
    attach(standing[0].endpoint, private_key=key)
    yield standing
    shutdown()


@pytest.fixture
def mortal(tmp_path: Path, key: Path) -> Iterator[list[HostProcess]]:
    """The same for tests that end some of them."""
    with user_hosts(tmp_path, 3, "--lease-s", "2", key=key) as agents:
        attach(agents[0].endpoint, private_key=key)
        yield agents


def dialled(ports: set[int]) -> set[int]:
    """Ports of this machine to which this process has a TCP connection."""
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(words[2].rpartition(":")[2], 16) for words in lines if f"socket:[{words[9]}]" in sockets} & ports


def workers_of(agents: list[HostProcess], key: Path) -> Any:
    hosts = attach_to_workers(ca=key, workers=[agent.endpoint for agent in agents])
    assert hosts.initialized.get(SOON) is True
    return hosts


def test_hosts_reached_only_through_the_gateway_form_an_ordinary_mesh(cluster: list[HostProcess], key: Path) -> None:
    procs = workers_of(cluster, key).spawn_procs(per_host={"slots": 2}, name="far")
    local_procs = this_host().spawn_procs(name="near")
    members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
    locations = members.where.call().get(SOON).values()
    assert [rank for rank, _ in locations] == list(range(6))
    assert list(callers.call.call(members).get(SOON).values()) == [locations] * 6
    data = bytes(5_000_000)
    assert list(members.length.call(data).get(SOON).values()) == [len(data)] * 6
    local = local_procs.spawn("here", Member)
    answers = callers.slice(hosts=2, slots=1).call.call_one(local).get(SOON)
    assert answers == local.where.call().get(SOON).values()
    assert local_procs.spawn("out", Caller).call.call_one(members).get(SOON) == locations
    assert dialled({agent.port for agent in cluster}) == {cluster[0].port}
    local_procs.stop().get(SOON)


def test_a_gateway_may_be_one_of_the_workers_by_another_name(cluster: list[HostProcess], key: Path) -> None:
    address = (
        f"tcp://localhost:{cluster[0].port}"  # it was attached as 127.0.0.1, as a name outside differs from one inside
    )
    hosts = attach_to_workers(ca=key, workers=[address, cluster[1].endpoint])
    assert hosts.initialized.get(SOON) is True
    members = hosts.spawn_procs(name="far").spawn("members", Member)
    assert [rank for rank, _ in members.where.call().get(SOON).values()] == [0, 1]


@pytest.mark.slow
def test_hosts_behind_a_gateway_get_another_key_with_it(tmp_path: Path) -> None:
    own = tmp_path / "own.key"
    Keys.load_or_create(own)
    with user_hosts(tmp_path, 3, key=own) as agents:
        attach(agents[0].endpoint, private_key=own)
        hosts = workers_of(agents, own)
        procs = hosts.spawn_procs(name="far")
        members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
        locations = members.where.call().get(SOON).values()
        hosts.rotate_key(own)
        assert list(callers.call.call(members).get(SOON).values()) == [locations] * 3
        new_procs = workers_of(agents, own).spawn_procs(name="near")
        assert new_procs.spawn("members", Member).where.call().get(SOON)


@pytest.mark.slow
def test_a_rank_that_dies_behind_the_gateway_is_told_and_healed(
    cluster: list[HostProcess], key: Path, faults: list[MeshFailure]
) -> None:
    members = workers_of(cluster, key).spawn_procs(name="far").spawn("members", Member)
    pids = [pid for _, pid in members.where.call().get(SOON).values()]
    call = members.nap.call(300, 2)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        call.get(SOON)
    heal_mesh(members)
    new_pids = [pid for _, pid in members.where.call().get(SOON).values()]
    assert new_pids[:2] == pids[:2]
    assert new_pids[2] != pids[2]


@pytest.mark.slow
def test_hosts_behind_a_gateway_are_lost_one_by_one_or_together(
    mortal: list[HostProcess], key: Path, faults: list[MeshFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_host, "REFUSED_S", 0.5)
    members = workers_of(mortal, key).spawn_procs(name="far").spawn("members", Member)
    members.where.call().get(SOON)
    call = members.slice(hosts=2).nap.call_one(300, 2)
    mortal[2].kill()
    with pytest.raises(SupervisionError, match="nobody listens"):
        call.get(SOON)
    assert len(members.slice(hosts=slice(0, 2)).where.call().get(SOON)) == 2
    call = members.slice(hosts=1).nap.call_one(300, 1)
    mortal[0].kill()
    with pytest.raises(SupervisionError, match=r"the gateway .* is lost"):
        call.get(SOON)


@pytest.mark.slow
def test_connections_to_the_gateway_and_behind_it_that_break_lose_nothing(tmp_path: Path, key: Path) -> None:
    with user_hosts(tmp_path, 2, key=key) as agents:
        proxies = [Proxy(agent.endpoint) for agent in agents]
        try:
            attach(proxies[0].endpoint, private_key=key)
            hosts = attach_hosts([proxies[1].endpoint], key=key)
            members = hosts.spawn_procs(name="far").spawn("members", Member)
            members.where.call().get(SOON)
            for number in range(300):
                if number in (100, 200):
                    proxies[number // 200].reset()
                members.note.broadcast(number)
            assert list(members.in_order.call("root", list(range(300))).get(SOON).values()) == [True]
        finally:
            shutdown()
            for proxy in proxies:
                proxy.close()


CLIENT = """
import sys, time
from monarch_nb.actor import attach, attach_to_workers
from tests.cluster.hosts_tools import Member
gateway, far, key = sys.argv[1:]
from pathlib import Path
attach(gateway, private_key=Path(key))
members = attach_to_workers(ca=Path(key), workers=[far]).spawn_procs(name="left").spawn("members", Member)
print(members.where.call_one().get(30)[1], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_processes_of_a_client_behind_the_gateway_end_with_it(tmp_path: Path, key: Path) -> None:
    with user_hosts(tmp_path, 2, "--lease-s", "1", key=key) as agents:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, agents[0].endpoint, agents[1].endpoint, str(key)],
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        )  # fmt: skip
        assert client.stdout is not None
        with client.stdout as out:
            pid = int(out.readline())
        client.kill()
        client.wait()
        until(lambda: not alive(pid))
        assert all(agent.process.poll() is None for agent in agents)


@pytest.mark.slow
def test_shutting_hosts_down_ends_those_behind_the_gateway_and_then_it(
    mortal: list[HostProcess], tmp_path: Path, key: Path
) -> None:
    workers_of(mortal, key).shutdown().get(SOON)
    assert [agent.process.wait(SOON) for agent in mortal] == [0, 0, 0]
    with user_hosts(tmp_path, 1, key=key) as [another]:  # reached without the gateway, which has ended
        assert attach_hosts([another.endpoint], key=key, timeout=SOON).sizes == {"hosts": 1}


@pytest.mark.slow
def test_faults_behind_the_gateway_are_reported_through_it(
    cluster: list[HostProcess], tmp_path: Path, key: Path
) -> None:
    wrong_key = tmp_path / "other.key"
    Keys.load_or_create(wrong_key)
    refusal = pytest.raises(AttachError, match=r"does not accept this key.*asked by the gateway")
    with user_hosts(tmp_path, 1, key=wrong_key, shutdown=False) as [stranger], refusal:
        attach_hosts([stranger.endpoint], key=key, timeout=3)
    with pytest.raises(AttachError, match="nobody listens"):
        attach_hosts([stranger.endpoint], key=key, timeout=1)


def test_a_gateway_is_named_once(cluster: list[HostProcess], key: Path) -> None:
    attach(cluster[0].endpoint, private_key=key)
    with pytest.raises(RuntimeError, match="already"):
        attach(cluster[1].endpoint, private_key=key)
    shutdown_context().get(SOON)
    attach(cluster[1].endpoint, private_key=key)


def test_a_gateway_that_is_not_there_is_told(key: Path) -> None:
    with configured(mesh_attach_config_timeout="1s"), pytest.raises(AttachError, match="nobody listens"):
        attach("tcp://127.0.0.1:1", private_key=key)
    with pytest.raises(TrustError, match="needs a key"):
        attach("tcp://192.0.2.1:22222")


@pytest.fixture
def unattached() -> Iterator[None]:
    """A process without a gateway, before and after the test."""
    yield
    shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("unattached")
def test_a_worker_of_this_machine_can_be_the_gateway() -> None:
    with short_folder() as folder:
        address = f"ipc://{folder}/worker"
        start_worker_loop_until_shutdown(address)
        attach(address)
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
        procs: ProcMesh = hosts.spawn_procs(per_host={"slots": 2})
        assert len(procs.spawn("members", Member).where.call().get(SOON)) == 2
        hosts.shutdown().get(SOON)


class Relay(Actor):
    def __init__(self, target: Any) -> None:
        self.target = target

    @endpoint
    def ask(self) -> int:
        return int(self.target.pid.call_one().get(SOON))


@pytest.mark.slow
@pytest.mark.usefixtures("unattached")
def test_hosts_attached_through_a_worker_no_longer_need_its_address() -> None:
    with short_folder() as folder, workers_at(f"ipc://{folder}/worker"):
        attach(f"ipc://{folder}/worker")
        (folder / "worker").unlink()
        hosts = attach_to_workers(ca="trust_all_connections", workers=[f"ipc://{folder}/worker"])
        procs = hosts.spawn_procs(per_host={"slots": 2})
        assert len(where(procs).pid.call().get(SOON)) == 2
        assert this_host().region == this_proc().host_mesh.region
        local = where(this_host().spawn_procs(per_host={"local": 1}))
        assert procs.spawn("relay", Relay, local).ask.call().get(SOON).values() == [local.pid.call_one().get(SOON)] * 2
        hosts.shutdown().get(SOON)
