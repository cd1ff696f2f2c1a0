"""Everything at once for a while: nothing grows in controller, agent and processes."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.processes import MARK, left_behind
from tests.soak.samples import MEGABYTE, Samples

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
PAUSE = 2.5  # seconds between rounds, which leave others the processor


def soak(seconds: float, pause: float, body: int) -> None:
    """Raises AssertionError, with its output, if anything grew or went wrong, or anything is left."""
    mark = secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--seconds", str(seconds), "--pause", str(pause), "--body", str(body)],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds + 300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert left_behind(mark) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_calls_bodies_floods_kills_and_heals_leave_nothing_behind() -> None:
    soak(SECONDS, pause=PAUSE, body=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_of_everything_leave_nothing_behind() -> None:
    soak(600, pause=0.0, body=64)


def test_a_slow_leak_is_found_and_an_early_step_is_not() -> None:
    warmed, slow = Samples(), Samples()
    for number in range(90):
        warmed.counts.setdefault(("agent", "memory"), []).append((20 if number < 25 else 50) * MEGABYTE)
        slow.counts.setdefault(("agent", "memory"), []).append((50 + number / 10 + 20 * (number % 9 == 0)) * MEGABYTE)
    assert warmed.grown() == []
    assert len(slow.grown()) == 1


def test_steady_growth_is_found_and_fluctuation_is_not() -> None:
    steady, leaky = Samples(), Samples()
    for number in range(40):
        steady.counts.setdefault(("agent", "memory"), []).append((50 + number % 7) * MEGABYTE)
        leaky.counts.setdefault(("agent", "memory"), []).append((50 + number) * MEGABYTE)
        leaky.counts.setdefault(("rank 0", "descriptors"), []).append(20 + number // 2)
    assert steady.grown() == []
    memory, descriptors = leaky.grown()
    assert memory.startswith("memory of agent: by ")
    assert descriptors.startswith("descriptors of rank 0: by ")
