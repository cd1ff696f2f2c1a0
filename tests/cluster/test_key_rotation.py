"""Hosts change keys at work: calls go on, and holders of the former key are refused."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import connect
from monarch_nb.actor import ProcMesh, accept_hosts, attach_hosts
from monarch_nb.config import configured
from monarch_nb.connect import AttachError
from monarch_nb.host import mesh_files
from monarch_nb.job import ProcessJob
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.transport import Keys, TrustError
from tests.cluster.fault_tools import ROOT
from tests.cluster.hosts_tools import SOON, Caller, HostProcess, Member, faults, nothing_left, user_hosts
from tests.cluster.test_joining import DiallingHost
from tests.polling import until
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)
__all__ = ["faults", "nothing_left"]

OTHER = """
import sys
from monarch_nb.actor import attach_hosts
hosts = attach_hosts(sys.argv[2:], key=sys.argv[1], name="other")
print("attached", flush=True)
sys.stdin.read()
"""
WORKER = """
import sys
from pathlib import Path
from monarch_nb.connect import run_worker_until_killed
run_worker_until_killed(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key file of this process; each agent has its own copy."""
    keys = Keys.create()
    for name in ("here", "0", "1"):
        keys.save(tmp_path / f"{name}.key")
    return tmp_path / "here.key"


@pytest.fixture
def agents(key: Path, tmp_path: Path) -> Iterator[list[HostProcess]]:
    with (
        user_hosts(tmp_path, 1, key=tmp_path / "0.key") as first,
        user_hosts(tmp_path, 1, key=tmp_path / "1.key") as second,
    ):
        yield [*first, *second]
        connect.shutdown()


def attach(agents: list[HostProcess], key: Path) -> Any:
    return attach_hosts([agent.endpoint for agent in agents], key=key, timeout=SOON)


def spawn(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"slots": 1}, name="members").spawn("members", Member)


def test_calls_go_on_while_the_key_changes(agents: list[HostProcess], key: Path, tmp_path: Path) -> None:
    old_keys = Keys.load(key)
    hosts = attach(agents, key)
    procs: ProcMesh = hosts.spawn_procs(per_host={"slots": 1}, name="pair")
    members, callers = procs.spawn("members", Member), procs.spawn("callers", Caller)
    done, count = threading.Event(), 0

    def note() -> None:
        nonlocal count
        while not done.is_set():
            members.note.call(count).get(SOON)
            count += 1

    thread = threading.Thread(target=note)
    thread.start()
    request = members.held.call(tmp_path / "go", 1)
    for _ in range(3):
        hosts.rotate_key(key)
    (tmp_path / "go").touch()
    assert request.get(SOON).values() == [0, 1]
    callers.tell.call(members, 10, "each other").get(SOON)  # over connections between the hosts
    until(lambda: members.count.call("each other").get(SOON).values() == [20, 20])
    done.set()
    thread.join()
    assert members.in_order.call("root", list(range(count))).get(SOON).values() == [True, True]
    new_keys = Keys.load(key)
    assert new_keys != old_keys
    assert [Keys.load(tmp_path / f"{name}.key") for name in "01"] == [new_keys, new_keys]
    with pytest.raises(AttachError, match="does not accept this key"):
        attach_hosts([agents[0].endpoint], key=old_keys, timeout=5)


def test_hosts_that_dial_dial_with_the_new_key(key: Path, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    agent = DiallingHost(tmp_path, endpoint, tmp_path / "0.key")
    try:
        hosts = accept_hosts(1, at=endpoint, key=key)
        members = spawn(hosts)
        members.where.call().get(SOON)
        hosts.rotate_key(key)
        assert members.where.call().get(SOON)
        assert Keys.load(tmp_path / "0.key") == Keys.load(key)
    finally:
        connect.shutdown()
        agent.close()


@pytest.mark.slow
def test_a_host_that_is_used_by_another_program_keeps_its_key(agents: list[HostProcess], key: Path) -> None:
    old_keys = Keys.load(key)
    hosts = attach(agents, key)
    words = [sys.executable, "-c", OTHER, str(key), agents[1].endpoint]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ROOT}, **pipes) as user:  # type: ignore[call-overload]
        assert user.stdout.readline() == b"attached\n"
        with pytest.raises(TrustError, match="other programs use the hosts"):
            hosts.rotate_key(key)
        assert Keys.load(key) == old_keys
        assert spawn(hosts).where.call().get(SOON)
        hosts.rotate_key(key, force=True)
        user.stdin.close()
    assert Keys.load(key) != old_keys


@pytest.mark.slow
def test_a_file_that_cannot_be_written_changes_nothing(agents: list[HostProcess], key: Path, tmp_path: Path) -> None:
    hosts = attach(agents, key)
    with pytest.raises(TrustError, match=r"nowhere/job\.key cannot be written: No such file"):
        hosts.rotate_key(tmp_path / "nowhere" / "job.key")
    assert spawn(hosts).where.call().get(SOON)
    with pytest.raises(ValueError, match="name the file"):
        hosts.rotate_key()
    job = ProcessJob({"keyless": 1})
    with pytest.raises(ValueError, match="reached without a key, and have none to change"):
        job.state(None).keyless.rotate_key()
    job.kill()


def test_a_host_that_ends_during_a_change_cancels_it(agents: list[HostProcess], key: Path, faults: list[Any]) -> None:
    old_keys, hosts = Keys.load(key), attach(agents, key)
    agents[0].kill()
    with pytest.raises(TrustError, match=r"the key was not changed: .* has ended"):
        hosts.rotate_key(key)
    assert Keys.load(key) == old_keys
    hosts.rotate_key(key)
    assert attach_hosts([agents[1].endpoint], key=key, timeout=SOON).initialized.get(SOON)


def test_agents_that_cannot_write_their_key_files_keep_the_former_key(key: Path, tmp_path: Path) -> None:
    folder, old = tmp_path / "agent", Keys.load(key)
    folder.mkdir()
    old.save(folder / "a.key")
    with user_hosts(tmp_path, 1, key=folder / "a.key") as agents:
        hosts = attach(agents, key)
        folder.rename(tmp_path / "away")
        with pytest.raises(TrustError, match=r"\(\S+: \S+/a\.key: No such file or directory\)\. Make"):
            hosts.rotate_key(key)
        assert Keys.load(key) == old
        assert spawn(hosts).where.call().get(SOON)
        (tmp_path / "away").rename(folder)
        hosts.rotate_key(key)
        assert Keys.load(key) == Keys.load(folder / "a.key") != old
        connect.shutdown()


@pytest.mark.slow
def test_a_host_that_is_silent_gets_the_new_key_later(
    agents: list[HostProcess], key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = attach(agents, key)
    members = spawn(hosts)
    members.where.call().get(SOON)
    os.kill(agents[1].pid, signal.SIGSTOP)
    with pytest.raises(TrustError, match="it has not answered"):
        hosts.rotate_key(key, timeout=1)
    os.kill(agents[1].pid, signal.SIGCONT)
    assert members.where.call().get(SOON)
    save = Keys.save

    def save_and_stop(keys: Keys, path: Path) -> None:
        save(keys, path)
        os.kill(agents[1].pid, signal.SIGSTOP)

    monkeypatch.setattr(Keys, "save", save_and_stop)
    hosts.rotate_key(key, timeout=1)
    assert "out of touch, and to get it once back: " in caplog.text
    assert members.slice(hosts=0).where.call().get(SOON)
    os.kill(agents[1].pid, signal.SIGCONT)
    assert members.where.call().get(SOON)
    until(lambda: Keys.load(key.with_name("1.key")) == Keys.load(key))


def test_an_agent_that_is_started_again_has_the_new_key(key: Path, tmp_path: Path, faults: list[Any]) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, endpoint, str(tmp_path / "0.key")], env={**os.environ, "PYTHONPATH": ROOT}
    )
    try:
        hosts = attach_hosts([endpoint], key=key, timeout=SOON)
        members = spawn(hosts)
        hosts.rotate_key(key)
        [(_, pid)] = members.where.call().get(SOON).values()
        agent = int(Path(f"/proc/{pid}/status").read_text().partition("PPid:")[2].split()[0])
        os.kill(agent, signal.SIGKILL)
        until(lambda: faults)
        heal_mesh(members)
        assert members.where.call().get(SOON)
    finally:
        connect.shutdown()
        worker.kill()
        worker.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_records_of_kept_meshes_have_the_new_key(
    agents: list[HostProcess], key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with configured(mesh_keep="5m" if kept else "0s"):
        hosts = attach(agents, key)
        members = spawn(hosts)
        members.where.call().get(SOON)
        paths = (tmp_path / "state").rglob("*.json")
        if kept:
            until(lambda: any((tmp_path / "state").rglob("*.json")))
        hosts.rotate_key(key)
        records = [mesh_files.read(path) for path in paths]
        keys = {way.key.encode() for record in records if record is not None for way in record.ways}
        assert keys == ({key.read_bytes()} if kept else set())
        assert members.where.call().get(SOON)
        connect.shutdown()
