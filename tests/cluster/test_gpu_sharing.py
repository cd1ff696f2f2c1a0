"""Processes that share a GPU by MPS: a real agent and real processes, with a program that behaves as NVIDIA's does."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, SupervisionError, endpoint, this_host
from monarch_nb.config import configured
from monarch_nb.connect import own_hosts
from monarch_nb.runtime import current_runtime
from tests.cluster.actor_tools import SECONDS
from tests.cluster.fault_tools import agent
from tests.polling import until

pytestmark = pytest.mark.timeout(120)
# With -d it starts a daemon, else it reads a command for this folder's daemon, like NVIDIA's program.
CONTROL = """#!/bin/sh
pipes="$CUDA_MPS_PIPE_DIRECTORY"
daemon="$pipes/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    if [ -n "$REFUSES" ]; then echo "$REFUSES"; exit 1; fi
    sleep 1000 </dev/null >/dev/null 2>&1 &
    echo $! >"$daemon"
    touch "$pipes/control"
    echo "start $! $pipes visible=$CUDA_VISIBLE_DEVICES" >>"$SEEN"
    exit 0
fi
read command
kill -0 "$(cat "$daemon")" || exit 1
echo "$command $(cat "$daemon")" >>"$SEEN"
if [ "$command" = quit ]; then kill "$(cat "$daemon")"; rm "$daemon" "$pipes/control"; fi
"""
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
)


class Rank(Actor):
    @endpoint
    def environment(self) -> tuple[str | None, ...]:
        return tuple(map(os.environ.get, NAMES))


class Mps:
    """The program, and the commands that it got."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "seen"
        self.program = folder / "nvidia-cuda-mps-control"
        self.program.write_text(CONTROL)
        self.program.chmod(0o700)

    def commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def daemons(self) -> list[int]:
        return [int(line.split()[1]) for line in self.commands() if line.startswith("start ")]


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mps]:
    """One GPU, which an agent of this test alone gives to processes."""
    stub = Mps(tmp_path)
    own_hosts.shutdown()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(stub.log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    yield stub
    own_hosts.shutdown()
    until(lambda: not any(map(_lives, stub.daemons())), "no daemon is left")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _environments(count: int) -> list[tuple[str | None, ...]]:
    procs = this_host().spawn_procs(per_host={"gpus": count}, name="sharing")
    environments: Any = procs.spawn("ranks", Rank).environment.call().get(SECONDS)
    procs.stop().get(SECONDS)
    return list(environments.values())


def test_ranks_share_a_gpu_by_the_daemon_of_an_agent(mps: Mps) -> None:
    with configured(share_gpus="mps"):
        first, second = _environments(2)
        assert first == second
        gpu, pipes, logs, threads = first
        assert (gpu, threads) == ("GPU-7", None)
        for folder in (str(pipes), str(logs)):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            assert Path(folder).parents[1] == agent().run_folder
        assert _environments(2)[0][1] == pipes
    (daemon,) = mps.daemons()
    assert mps.commands() == [f"start {daemon} {pipes} visible="]
    assert _lives(daemon)
    own_hosts.shutdown()
    assert mps.commands()[-1] == f"quit {daemon}"
    until(lambda: not _lives(daemon), "the daemon has ended")


def test_each_rank_gets_an_equal_part_where_that_is_wanted(mps: Mps) -> None:
    with configured(share_gpus="mps-equal"):
        assert [environment[3] for environment in _environments(3)] == ["33"] * 3


def test_the_daemon_ends_with_an_agent_that_is_killed(mps: Mps, faults: Any) -> None:
    with configured(share_gpus="mps"):
        _environments(1)
    (daemon,) = mps.daemons()
    os.kill(agent().pid, signal.SIGKILL)
    until(lambda: not _lives(daemon), "the daemon has ended")
    while faults.left():
        pass


@pytest.mark.slow
def test_a_daemon_of_somebody_else_is_used_and_left_alone(
    mps: Mps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert os.waitstatus_to_exitcode(os.system(f"{mps.program} -d")) == 0
    (daemon,) = mps.daemons()
    with configured(share_gpus="mps"):
        assert _environments(2)[0][1] == str(tmp_path)
    own_hosts.shutdown()
    assert _lives(daemon)
    assert not any(line.startswith("quit") for line in mps.commands())
    os.kill(daemon, signal.SIGKILL)


def test_without_the_program_a_spawn_is_refused_at_once(mps: Mps) -> None:
    mps.program.unlink()
    with (
        configured(share_gpus="mps"),
        pytest.raises(ValueError, match=r"cannot be shared by MPS: nvidia-cuda-mps-control"),
    ):
        this_host().spawn_procs(per_host={"gpus": 2})


def test_a_daemon_that_does_not_start_is_the_reason(mps: Mps, monkeypatch: pytest.MonkeyPatch, faults: Any) -> None:
    monkeypatch.setenv("REFUSES", "Cannot find device 7")
    with configured(share_gpus="mps"):
        procs: Any = this_host().spawn_procs(per_host={"gpus": 2}, name="sharing")
        with pytest.raises(SupervisionError, match="-d ended with 1: Cannot find device 7"):
            procs.spawn("ranks", Rank).environment.call().get(SECONDS)
    assert current_runtime().host
    crashed: set[int] = set()
    while crashed != {0, 1}:
        crashed.update(faults.next().crashed_ranks)
