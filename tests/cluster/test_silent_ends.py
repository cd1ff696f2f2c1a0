"""A program may end at any point, and does so silently."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.ending_programs import SCENARIOS

ROOT = Path(__file__).parents[2]
QUICK = ["threads", "peers"]
TIMES = 25  # each scenario; hundreds at night


def run(job: tuple[str, int]) -> tuple[str, int, int, str]:
    scenario, seed = job
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.ending_programs", scenario, str(seed)],
        cwd=ROOT, env={**os.environ, "MONARCH_NB_ENABLE_LOG_FORWARDING": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return scenario, seed, done.returncode, done.stdout + done.stderr


def loud(jobs: list[tuple[str, int]], side_by_side: int) -> list[tuple[str, int, int, str]]:
    with ThreadPoolExecutor(side_by_side) as pool:
        return [result for result in pool.map(run, jobs) if result[2] or result[3]]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_that_ends_in_the_middle_of_something_says_nothing() -> None:
    assert loud([(scenario, 1) for scenario in QUICK], 2) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_program_says_anything_at_its_end_whenever_that_is() -> None:
    assert loud([(scenario, seed) for seed in range(TIMES) for scenario in SCENARIOS], 4) == []


@pytest.mark.timeout(120)
def test_exceptions_that_a_program_raises_at_its_end_are_shown(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, threading\n"
        "from tests.cluster.ending_programs import Program\n"
        "ends = threading.Event()\n"
        "def late():\n"
        "    ends.wait()\n"
        "    raise ValueError('of a thread')\n"
        "thread = threading.Thread(target=late, daemon=True)\n"
        "thread.start()\n"
        "atexit.register(thread.join)  # after all that the library does at the end\n"
        "atexit.register(ends.set)\n"
        "program = Program(0)\n"
        "program.calls()\n"
        "raise RuntimeError('of the program')\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 2, done.stderr
    assert "RuntimeError: of the program" in done.stderr
    assert "ValueError: of a thread" in done.stderr
