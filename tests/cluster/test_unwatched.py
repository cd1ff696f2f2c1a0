"""A mesh that hangs while it has no controller: its agent finds out why, and that can be read when all is gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.detach_tools import ROOT, Controller
from tests.cluster.test_detach import agents, place
from tests.polling import until

__all__ = ["agents", "place"]
pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


def why(run: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "monarch_nb", "why", run]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_hang_and_death_are_found_shown_and_kept(place: Path) -> None:
    first = Controller(place, "leave_hanging", "120s").done()
    pids = [int(pid) for pid in first.said("pids")[0]]
    hangs = "perhaps: gpus=2 alone has not answered hanger.hang() for "
    until(lambda: hangs in why("trainers").stdout)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: "gpus=0 is dead: " in why("hanger").stdout)
    second = Controller(place, "find").done()
    assert any(hangs in line for line in second.lines), second.lines
    text = why("trainers").stdout
    assert text.startswith("trainers: its record is gone: it was stopped, or has ended\n")
    assert hangs in text
    assert "it sits in Condition.wait at threading.py:" in text
    assert ", called at detach_programs.py:" in text
    assert "inspected: 2 processes of trainers on host " in text


def test_a_rank_of_another_host_that_holds_up_all_is_found(
    place: Path, agents: tuple[Path, Callable[..., list[Any]]]
) -> None:
    key, start = agents
    endpoints = [agent["endpoint"] for agent in start("--tcp", "tcp://127.0.0.1:0")]
    first = Controller(place, "leave_hanging_hosts", str(key), *endpoints).done()
    pids = [int(pid) for pid in first.said("pids")[0]]
    missing = "hosts=1 gpus=1 has not begun all_reduce no. 1 (detach_programs.py:"
    waiting = "where hosts=0 gpus=0-1; hosts=1 gpus=0 have waited"
    until(lambda: missing in (text := why("trainers").stdout) and waiting in text)
    assert why("trainers").stdout.count(missing) == 1
    os.kill(pids[2], signal.SIGSTOP)
    try:
        until(lambda: "hosts=1 gpus=0 is stopped by a signal" in why("trainers").stdout)
    finally:
        os.kill(pids[2], signal.SIGCONT)
    os.kill(pids[3], signal.SIGKILL)
    until(lambda: "hosts=1 gpus=1 is dead: it has ended on host " in why("trainers").stdout)
    Controller(place, "find").done()


def test_unknown_run_is_an_error(place: Path) -> None:
    done = why("nobody")
    assert done.returncode == 1
    assert "nothing is known on this machine about a mesh 'nobody'; known are: none" in done.stderr
