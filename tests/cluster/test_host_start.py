"""Procs started by fork from the template or cold, and their environment."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.host import AgentStartError, verbs
from tests.cluster.host_client import Client, Refusal, begin_agent, hosted, left_of
from tests.polling import until
from tests.processes import alive, freeze, proc_stat

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

WITH_TORCH = {**os.environ, "MONARCH_NB_PRELOAD": "numpy,torch"}


def facts(client: Client, address: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(client.log(address, until="\n"))
    return values


def parent_of(pid: int) -> int:
    return int(proc_stat(Path(f"/proc/{pid}"))[1])


def test_procs_are_forked_from_a_single_threaded_template_under_the_agent() -> None:
    with hosted() as (handle, client):
        started = client.started(*client.spawn(3))
        assert [event.how for event in started] == ["fork"] * 3
        status = client.status()
        assert status.template_threads == 1
        assert [proc.state for proc in status.procs] == ["running"] * 3
        for event in started:
            until(lambda pid=event.pid: parent_of(pid) == handle.pid)


@pytest.mark.slow
def test_a_forked_proc_looks_like_a_fresh_one(tmp_path: Path) -> None:
    with hosted() as (_, client):
        forked, sibling = client.spawn(2, "facts", env=({"MINE": "1", "HOME": None},), cwd=str(tmp_path))
        [cold] = client.spawn(
            1, "facts", env=({"MINE": "1", "HOME": None},), cwd=str(tmp_path), bootstrap_env_cold=True
        )
        fork, twin, fresh = facts(client, forked), facts(client, sibling), facts(client, cold)
        assert fork["random"] != twin["random"]
        for name in ("cwd", "env", "int", "hup", "path0", "stdin", "torch_threads", "main"):
            if not (name == "torch_threads" and fresh[name] is None):
                assert fork[name] == fresh[name], name
        assert fork["cwd"] == str(tmp_path)
        assert fork["env"]["MINE"] == "1"
        assert "HOME" not in fork["env"]
        assert "OMP_NUM_THREADS" not in fork["env"] or "OMP_NUM_THREADS" in os.environ
        assert fork["sid"] == fork["pid"]
        kinds = [fd.partition(":")[2] for fd in fork["fds"][3:] if "/spool/" not in fd]
        assert sorted(kinds) == ["pipe", "socket"]


def waits_for(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment whose template imports until a file exists, and that file."""
    gate = tmp_path / "gate"
    (tmp_path / "slow_module.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    )
    return {**os.environ, "MONARCH_NB_PRELOAD": "slow_module", "PYTHONPATH": str(tmp_path)}, gate


@pytest.mark.slow
def test_the_first_procs_need_not_wait_for_what_the_template_imports(tmp_path: Path) -> None:
    env, gate = waits_for(tmp_path)
    with hosted(env=env) as (handle, client):
        first = client.started(*client.spawn(4, heavy=False))
        assert [proc.how for proc in first] == ["fork"] * 4
        for proc in first:
            until(lambda pid=proc.pid: parent_of(pid) == handle.pid)
        os.kill(first[0].pid, signal.SIGKILL)
        until(lambda: not alive(first[0].pid))
        assert client.started(*client.spawn(1, heavy=False))[0].how == "fork"  # replaces the killed one
        assert client.status().template_seconds is None
        extra, heavy = client.spawn(1, heavy=False), client.spawn(1)  # one too many, and one that needs the imports
        gate.touch()
        assert [proc.how for proc in client.started(*extra, *heavy)] == ["fork"] * 2
        status = client.status()
        assert status.template_threads == 1
        assert status.template_pid is not None
        until(lambda: parent_of(status.template_pid or 0) == handle.pid)


@pytest.mark.slow
def test_templates_that_die_before_they_are_ready_cost_nothing_but_time(tmp_path: Path) -> None:
    env, _ = waits_for(tmp_path)
    with hosted(env=env) as (_, client):
        until(lambda: client.status().template_pid is not None)
        heavy = client.spawn(1)
        os.kill(client.status().template_pid or 0, signal.SIGKILL)
        [started] = client.started(*heavy)
        assert (started.how, started.why) == ("cold", "the template process died")


def test_nothing_of_templates_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
    env, _ = waits_for(tmp_path)
    with hosted(env=env) as (handle, client):
        [started] = client.started(*client.spawn(1, heavy=False))
        until(lambda: client.status().template_pid is not None)
        template = client.status().template_pid or 0

        def children() -> set[int]:
            return set(map(int, Path(f"/proc/{handle.pid}/task/{handle.pid}/children").read_text().split()))

        until(lambda: {template, started.pid} < children())  # adopted, like the light one
        family = children()
        os.kill(handle.pid, signal.SIGKILL)
        for pid in family:
            until(lambda pid=pid: not alive(pid))


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"bootstrap_env_cold": True}, "asked for"),
        ({"env": ({"OMP_PROC_BIND": "true"},)}, "OMP_PROC_BIND is read when libraries load"),
        pytest.param({"proc_bind": ({"cpus": "0"},)}, "proc_bind", marks=pytest.mark.slow),
        pytest.param({"python": sys.executable}, "another interpreter", marks=pytest.mark.slow),
    ],
)
def test_spawns_that_no_fork_can_honour_start_cold_and_say_why(wish: dict[str, Any], reason: str) -> None:
    with hosted(prewarm=False) as (_, client):
        [address] = client.spawn(1, "facts", **wish)
        [started] = client.started(address)
        assert (started.how, started.why) == ("cold", reason)
        assert facts(client, address)["spec"] == address
        assert client.status().template_pid is None


@pytest.mark.slow
def test_device_visibility_and_thread_counts_are_put_right_in_a_fork() -> None:
    with hosted(env=WITH_TORCH) as (_, client):
        env = {"CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "2"}
        [address] = client.spawn(1, "facts", env=(env,))
        assert client.started(address)[0].how == "fork"
        values = facts(client, address)
        assert values["env"]["CUDA_VISIBLE_DEVICES"] == "3"
        assert values["torch_threads"] in (2, None)


@pytest.mark.slow
def test_without_fork_and_pidfd_everything_still_works() -> None:
    with hosted(env={**os.environ, "MONARCH_NB_PORTABLE": "1"}) as (handle, client):
        [address] = client.spawn(1, "talks")
        [started] = client.started(address)
        assert (started.how, started.why) == ("cold", "no fork on this system")
        assert "line 29" in client.log(address, until="line 29\n")
        os.kill(started.pid, signal.SIGKILL)
        assert client.exited(address)[0].signal == signal.SIGKILL
        [second] = client.started(*client.spawn(1))
        os.kill(handle.pid, signal.SIGKILL)
        until(lambda: not alive(second.pid))


def test_a_template_killed_between_spawns_is_replaced() -> None:
    with hosted() as (_, client):
        client.started(*client.spawn(1))
        template = client.status().template_pid
        assert template is not None
        os.kill(template, signal.SIGKILL)
        until(lambda: client.status().template_pid not in (None, template))
        assert client.started(*client.spawn(1))[0].how == "fork"
        assert client.status().template_pid not in (None, template)
        assert [proc.state for proc in client.status().procs] == ["running", "running"]


@pytest.mark.slow
def test_a_template_killed_while_it_is_asked_costs_nothing_but_time() -> None:
    with hosted() as (_, client):
        client.started(*client.spawn(1))
        template = client.status().template_pid
        assert template is not None
        freeze(template)
        addresses = client.spawn(4)
        os.kill(template, signal.SIGKILL)
        for started in client.started(*addresses):
            assert (started.how, started.why) == ("cold", "the template process died")


def test_a_missing_interpreter_is_a_clear_exit() -> None:
    with hosted(prewarm=False) as (_, client):
        [exited] = client.exited(*client.spawn(1, python="/no/such/python"))
        assert exited.reason.endswith("No such file or directory: /no/such/python")
        assert exited.pid == 0


@pytest.mark.slow
def test_no_descriptors_left_is_said_and_the_agent_lives_on(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nulimit -n 64\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o700)
    with hosted(prewarm=False, python=str(wrapper)) as (_, client):
        addresses = client.spawn(40, bootstrap_env_cold=True)
        exited = client.event(verbs.PROC_EXITED, timeout=30)
        assert "no file descriptors left (limit 64)" in exited.reason
        assert len(client.status().procs) == len(addresses)


def test_a_life_is_started_once() -> None:
    with hosted() as (_, client):
        client.started(*client.spawn(1))
        name = client.status().procs[0].address.partition("/")[2].partition(".")[0]
        from monarch_nb.wire.header import Layout

        layout = Layout(name, (client.host,), 1)
        with pytest.raises(Refusal, match="its next start needs a new incarnation"):
            client.spawn(1, layout=layout)
        assert client.started(*client.spawn(1, layout=layout, incarnations=(1,)))


def test_an_agent_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(AgentStartError, match="key"):
        begin_agent("hx", folder, tcp="tcp://0.0.0.0:0", prewarm=False).wait()
    assert not left_of(folder)
