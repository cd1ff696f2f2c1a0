"""Connections between hosts that break for a while, or for good; agents and controllers that die."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import monarch_nb.actor
from monarch_nb import config
from monarch_nb.actor import MeshFailure, SupervisionError, current_runtime
from monarch_nb.connect import attach_hosts, remote_host, shutdown
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.diagnosis import Finding, diagnose
from monarch_nb.exceptions import HealError
from monarch_nb.host import folders
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.logs import MeshLogs
from monarch_nb.wire import host_name
from tests.cluster.hosts_tools import SOON, Caller, HostProcess, Member, faults, key, nothing_left, user_hosts
from tests.polling import until
from tests.processes import alive
from tests.proxy import Proxy

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
__all__ = ["faults", "key", "nothing_left"]


@pytest.fixture
def proxied(tmp_path: Path, key: Path) -> "Iterator[tuple[list[HostProcess], list[Proxy]]]":
    """Two hosts behind proxies, whose procs live 60 s without an owner."""
    proxies: list[Proxy] = []
    with user_hosts(tmp_path, 2, key=key) as agents:
        try:
            proxies += [Proxy(agent.endpoint) for agent in agents]
            yield agents, proxies
        finally:
            shutdown()
            for proxy in proxies:
                proxy.close()


def test_a_host_behind_a_broken_connection_is_unreachable(proxied: Any, key: Path) -> None:
    _, proxies = proxied
    far = attach_hosts([proxies[0].endpoint], key=key, lease=60.0).spawn_procs(name="far")
    far.initialized.get(SOON)
    proxies[0].cut()
    findings: list[Finding] = []

    def is_found() -> bool:
        findings[:] = diagnose(far, timeout=2).findings
        return any(finding.kind == "unreachable" for finding in findings)

    until(is_found)
    assert [(finding.mesh, finding.ranks, finding.sure) for finding in findings] == [("far", (0,), True)]
    assert "no connection to its agent at" in findings[0].text
    assert "the host counts as lost in" in findings[0].text
    proxies[0].mend()
    until(lambda: not diagnose(far, timeout=2))
    far.stop().get(SOON)


@pytest.mark.slow
def test_cuts_shorter_than_the_lease_lose_nothing_and_repeat_nothing(
    proxied: Any, key: Path, faults: list[MeshFailure]
) -> None:
    _, proxies = proxied
    procs = attach_hosts([proxy.endpoint for proxy in proxies], key=key).spawn_procs(name="pair")
    members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
    members.where.call().get(SOON)
    faults.clear()
    request = callers.tell.call(members, 200, "callers")  # from host to host
    for number in range(2000):
        members.note.broadcast(number)
        if number % 250 == 100:
            answer = members.where.call()
            for proxy in proxies:
                proxy.cut()
            for index in range(20):
                members.slice(hosts=index % 2).length.call_one(b"x" * 100_000)
            for proxy in proxies:
                proxy.mend()
            assert len(answer.get(SOON)) == 2
    request.get(SOON)
    assert members.in_order.call("root", list(range(2000))).get(SOON).values() == [True, True]
    until(lambda: members.count.call("callers").get(SOON).values() == [400, 400])
    assert faults == []


@pytest.mark.slow
def test_a_cut_longer_than_the_lease_fails_the_host_which_heals(
    proxied: Any, key: Path, faults: list[MeshFailure]
) -> None:
    agents, proxies = proxied
    hosts = attach_hosts([proxy.endpoint for proxy in proxies], key=key, lease=1.5)
    members = hosts.spawn_procs(name="pair").spawn("members", Member)
    pids = [pid for _, pid in members.where.call().get(SOON).values()]
    nap = members.nap.call(300, 1)
    proxies[1].cut()
    with pytest.raises(SupervisionError) as caught:
        nap.get(SOON)
    assert f"no connection to its agent at {proxies[1].endpoint} for 1.5 s" in str(caught.value)
    assert f"the host {host_name(agents[1].host)} was lost" in str(caught.value)
    until(lambda: not alive(pids[1]))  # its host's lease expired, too
    assert alive(pids[0])
    assert members.slice(hosts=0).where.call_one().get(SOON)[1] == pids[0]
    with pytest.raises(SupervisionError, match=f"the host {host_name(agents[1].host)} was lost"):
        members.where.call().get(SOON)
    proxies[1].mend()
    wait_for(hosts)
    heal_mesh(members)
    healed_pids = [pid for _, pid in members.where.call().get(SOON).values()]
    assert healed_pids[0] == pids[0]
    assert healed_pids[1] != pids[1]


def wait_for(hosts: Any) -> None:
    """Wait until all hosts are usable again."""
    until(lambda: not any(current_runtime().part(HostRoutes).attached[host].lost for host in hosts.host_ids))


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [False, True])
def test_worker_errors_and_logs_name_hosts_as_the_controller_does(
    wraps: bool, proxied: Any, key: Path, faults: list[MeshFailure], tmp_path: Path
) -> None:
    agents, proxies = proxied
    hosts = attach_hosts([agents[0].endpoint, proxies[1].endpoint], key=key, lease=1.0)
    procs = hosts.spawn_procs(name="pair")
    members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
    members.where.call().get(SOON)  # before one is busy for minutes
    request = callers.slice(hosts=0).nested.call_one(members.slice(hosts=1), 1, tmp_path / "asks", wraps)
    until((tmp_path / "asks").exists)
    agents[1].kill()
    error, logs = request.exception(SOON), current_runtime().part(MeshLogs).receiver
    assert isinstance(error, monarch_nb.actor.ActorError)
    until(lambda: any("seen: " in block.text for block in logs.written(procs._state.address(0))))
    written = "".join(block.text for block in logs.written(procs._state.address(0)))
    for text in (str(error), str(error.exception), written):
        assert f"the host {host_name(agents[1].host)} was lost" in text
        assert not any(agent.host in text for agent in agents)


@pytest.mark.slow
def test_a_killed_agent_is_reported_and_its_successor_takes_healed_procs(
    tmp_path: Path, key: Path, faults: list[MeshFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_host, "REFUSED_S", 1.0)
    with user_hosts(tmp_path, 2, key=key) as agents:
        hosts = attach_hosts([agent.endpoint for agent in agents], key=key)
        members = hosts.spawn_procs(name="pair").spawn("members", Member)
        first = members.where.call().get(SOON).values()
        nap = members.nap.call(300, 1)
        agents[1].kill()
        with pytest.raises(SupervisionError) as caught:
            nap.get(SOON)
        assert f"its agent has ended: nobody listens at {agents[1].endpoint}" in str(caught.value)
        assert f"the host {host_name(agents[1].host)} was lost" in str(caught.value)
        with pytest.raises(HealError, match=host_name(agents[1].host)):
            heal_mesh(members)
        agents.append(HostProcess(tmp_path, "--host", agents[1].host, tcp=agents[1].endpoint, key=key))
        wait_for(hosts)
        heal_mesh(members)
        second = members.where.call().get(SOON).values()
        assert second[0] == first[0]
        assert second[1] != first[1]


@pytest.mark.slow
def test_an_agent_restarted_at_once_is_known_to_be_new(tmp_path: Path, key: Path, faults: list[MeshFailure]) -> None:
    with user_hosts(tmp_path, 1, key=key) as agents:
        hosts = attach_hosts([agents[0].endpoint], key=key)
        members = hosts.spawn_procs(name="one").spawn("members", Member)
        members.where.call().get(SOON)
        nap = members.nap.call(300, 0)
        agents[0].kill()
        agents.append(HostProcess(tmp_path, "--host", agents[0].host, tcp=agents[0].endpoint, key=key))
        with pytest.raises(SupervisionError, match=r"was restarted|nobody listens") as caught:
            nap.get(SOON)
        if "nobody listens" in str(caught.value):  # sought between the two agents
            wait_for(hosts)
        heal_mesh(members)  # waits for the host of a new agent
        assert len(members.where.call().get(SOON)) == 1


CONTROLLER = """
import sys, time
from monarch_nb.connect import attach_hosts
from tests.cluster.hosts_tools import Member
hosts = attach_hosts([sys.argv[1]], key=sys.argv[2])
members = hosts.spawn_procs(per_host={"slots": 2}, name="left").spawn("members", Member)
print(*[pid for _, pid in members.where.call().get(30).values()], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_procs_of_a_killed_controller_end_with_its_lease(
    tmp_path: Path, key: Path, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_STALE_AFTER_S", 0.0)
    folders.sweep()  # left by earlier modules
    with user_hosts(tmp_path, 1, "--lease-s", "1", key=key) as [agent]:
        controller = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, agent.endpoint, str(key)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        )  # fmt: skip
        assert controller.stdout is not None
        try:
            with controller.stdout as out:
                pids = [int(word) for word in out.readline().split()]
            assert len(pids) == 2
            time.sleep(1.6)  # longer than the lease: an idle controller keeps it
            assert all(map(alive, pids))
            os.kill(controller.pid, signum)
            if signum == signal.SIGSTOP:  # its machine answers, it does not: nothing is stopped
                time.sleep(1.6)
                assert all(map(alive, pids))
                os.kill(controller.pid, signal.SIGKILL)
            until(lambda: not any(map(alive, pids)))
        finally:
            controller.kill()
            controller.wait()
        assert agent.process.poll() is None
        assert folders.sweep() == []  # a controller without a host of its own has no folder
        procs = attach_hosts([agent.endpoint], key=key).spawn_procs(name="next")
        assert len(procs.spawn("members", Member).where.call().get(SOON)) == 1


def restart(agent: HostProcess, folder: Path, key: Path) -> HostProcess:
    """Kill its agent and start one at the same endpoint."""
    agent.process.kill()
    agent.process.wait()
    return HostProcess(folder, "--host", agent.host, tcp=agent.endpoint, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.timeout(1200))], ids=["few", "many"])
def test_hosts_with_restarted_agents_talk_to_each_other_after_a_heal(
    rounds: int, tmp_path: Path, key: Path, faults: list[MeshFailure]
) -> None:
    dice = random.Random(rounds)
    with user_hosts(tmp_path, 2, key=key) as agents, config.configured(heal_max_restarts=2 * rounds + 1):
        procs = attach_hosts([agent.endpoint for agent in agents], key=key).spawn_procs(name="pair")
        members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
        callers.call.call(members).get(SOON)
        for number in range(rounds):
            # One alone, then both in turn: links of an old agent differ from those of a new one.
            for index in ([0], [1, 0], [1], [0, 1])[number % 4]:
                agents[index] = restart(agents[index], tmp_path, key)
                if dice.random() < 0.5:
                    until(partial(_is_back, agents[index]))
                time.sleep(dice.choice([0.0, 0.0, 0.3]))
            for agent in agents:
                until(partial(_is_back, agent))
            heal_mesh(procs)
            for index in dice.sample([0, 1, 0, 1], 4):
                began = time.monotonic()
                assert len(callers.slice(hosts=index).call.call_one(members).get(SOON)) == 2, number
                assert time.monotonic() - began < 15, "a question after a loss costs one second, a lost way sixty"


def _is_back(agent: HostProcess) -> bool:
    host = current_runtime().part(HostRoutes).attached[agent.host]
    return not host.lost and host.pid == agent.pid
