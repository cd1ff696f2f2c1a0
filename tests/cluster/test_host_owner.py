"""Owners keep hosts and procs alive; hosts and procs end with them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch_nb.host import protocol, verbs
from monarch_nb.host.launch import command
from monarch_nb.host.preemption import END
from monarch_nb.wire import parse_address
from monarch_nb.wire.header import Layout
from tests.cluster.host_client import ROOT, Client, hosted, left_of
from tests.polling import until
from tests.processes import alive, freeze

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

OWNER = f"""
import os, sys, time
sys.path.insert(0, {ROOT!r})
from tests.cluster.host_client import Client, begin_agent
handle = begin_agent("hown" + os.environ["OWN_HOST"], os.environ["OWN_FOLDER"]).wait()
client = Client(handle.host, handle.run_folder)
print(handle.pid, *[proc.pid for proc in client.started(*client.spawn(2))], flush=True)
if len(sys.argv) > 1 and os.fork() == 0:
    time.sleep(30)
time.sleep(1000)
"""


def owner(folder: Path, *arguments: str) -> tuple["subprocess.Popen[str]", list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OWN_HOST": str(os.getpid()), "OWN_FOLDER": str(folder)},
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as out:
        return process, [int(word) for word in out.readline().split()]


def test_when_the_owner_is_killed_nothing_is_left(tmp_path: Path) -> None:
    process, pids = owner(tmp_path / "r")
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, pids)) and not left_of(tmp_path / "r"))


@pytest.mark.slow
def test_a_forked_copy_of_the_owner_keeps_no_host_alive(tmp_path: Path) -> None:
    process, pids = owner(tmp_path / "r", "fork")
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: not any(map(alive, pids)) and not left_of(tmp_path / "r"))
    finally:
        with contextlib.suppress(ProcessLookupError):  # the copy may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)


def test_interrupting_the_owners_process_group_does_not_reach_the_host(tmp_path: Path) -> None:
    process, pids = owner(tmp_path / "r")
    groups = {os.getpgid(pid) for pid in pids}
    sessions = {os.getsid(pid) for pid in pids}
    assert process.pid not in groups | sessions
    assert len(groups) == 3
    for pid in pids[:1]:
        os.kill(pid, signal.SIGINT)  # agents ignore these signals too
        os.kill(pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    until(lambda: not left_of(tmp_path / "r"))


@pytest.mark.parametrize("kind", ["idle", "deaf", "holds_gil", "frozen", "with_child"])
def test_when_the_agent_is_killed_its_procs_are_gone(kind: str) -> None:
    with hosted() as (handle, client):
        [address] = client.spawn(1, "idle" if kind == "frozen" else kind)
        pids = [client.started(address)[0].pid, client.status().template_pid or 0]
        if kind == "frozen":
            freeze(pids[0])
        elif kind != "idle":
            text = client.log(address, until="\n")
            pids += [int(text.split()[1])] if kind == "with_child" else []
        os.kill(handle.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)))


def test_procs_owned_by_a_proc_end_with_it_recursively() -> None:
    with hosted() as (_, client):
        [grandparent] = client.spawn(1)
        [parent] = client.spawn(1, owner=grandparent)
        [child] = client.spawn(1, owner=parent)
        [unowned] = client.spawn(1)
        pids = [proc.pid for proc in client.started(grandparent, parent, child, unowned)]
        os.kill(pids[0], signal.SIGKILL)
        assert "its owner" in client.exited(child)[0].reason
        assert client.exited(parent)[0].expected
        assert alive(pids[3])


def start_kept_agent(folder: Path, host: str, lease_s: float) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        command("monarch_nb.host.agent", "--host", host, "--run-folder", folder, "--keep", "--lease-s", lease_s),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as out:
        assert b'"pid"' in out.readline()
    return process


def test_a_kept_host_survives_owners_but_their_procs_do_not(tmp_path: Path) -> None:
    process = start_kept_agent(tmp_path / "r", "hkept", lease_s=60.0)
    first = Client("hkept", tmp_path / "r", "first")
    second = Client("hkept", tmp_path / "r", "second")
    try:
        [lost] = first.spawn(1)
        [lost_pid] = [proc.pid for proc in first.started(lost)]
        [address] = second.spawn(1, layout=Layout("q", ("hkept",), 1))
        second.ask(verbs.WATCH, protocol.Addresses((lost,)))
        [kept_pid] = [proc.pid for proc in second.started(address)]
        # Only once both run: neither answers pings, and a start may outlast the lease.
        first.ask(verbs.LEASE, protocol.OwnerLease(seconds=1.0))
        first.close()
        assert "it was silent for longer than its lease" in second.exited(lost)[0].reason
        assert not alive(lost_pid)
        assert alive(kept_pid)
        assert process.poll() is None
        process.send_signal(END)
        assert process.wait(30) == 0
        until(lambda: not alive(kept_pid) and not left_of(tmp_path / "r"))
    finally:
        second.close()
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_remote_owner_that_answers_keeps_its_lease() -> None:
    with hosted(lease_s=4.0) as (handle, client):
        remote = Client(handle.host, handle.run_folder, "c", own_host="hfar")
        remote.answers_pings = True
        try:
            [address] = remote.spawn(1)
            [started] = remote.started(address)
            client.ask(verbs.WATCH, protocol.Addresses((address,)))
            deadline = time.monotonic() + 7.0
            while time.monotonic() < deadline and not client.events:
                assert alive(started.pid)
                until(lambda: remote.pings > 0)
                remote.pings = 0
            remote.answers_pings = False
            assert "it was silent" in client.exited(address)[0].reason
        finally:
            remote.close()


@pytest.mark.slow
def test_hosts_with_a_kept_mesh_outlive_their_owner_for_a_lease(tmp_path: Path) -> None:
    with hosted() as (handle, client):
        [started] = client.started(*client.spawn(1))
        holder = protocol.MeshHolder(address=client.address, pid=1, machine="here")
        uid = parse_address(started.address).mesh
        client.ask(verbs.HOLD, protocol.Hold(uid=uid, name="w", secret="s", seconds=3.0, keep=True, holder=holder))
        assert handle._process.stdin is not None
        handle._process.stdin.close()
        assert client.status().procs[0].pid == started.pid
        handle.wait(30)
        until(lambda: not left_of(handle.run_folder))
