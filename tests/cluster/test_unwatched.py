"""A mesh that hangs while it has no controller: its agent finds out why, and that can be read when all is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.detach_tools import ROOT, Controller
from tests.cluster.test_detach import place
from tests.polling import until

__all__ = ["place"]
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


def test_unknown_run_is_an_error(place: Path) -> None:
    done = why("nobody")
    assert done.returncode == 1
    assert "nothing is known on this machine about a mesh 'nobody'; known are: none" in done.stderr
