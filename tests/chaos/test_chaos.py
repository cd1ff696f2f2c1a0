"""A few seconds of chaos, and that its judge finds each kind of error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.ledger import judge
from tests.chaos.network import objection

ROOT = Path(__file__).resolve().parents[2]


def chaos(*options: str, timeout: float) -> str:
    """The output of a run; raises AssertionError if anything was wrong."""
    words = [sys.executable, "-m", "tests.chaos", *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(200)
@pytest.mark.skipif(bool(objection()), reason=f"NOT TESTED HERE: {objection()}")
def test_a_job_on_three_hosts_bears_faults_of_all_kinds() -> None:
    seed = os.environ.get("CHAOS_SEED", "7")
    assert "controllers: " in chaos("--faults", "14", "--seconds", "8", "--seed", seed, timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(objection()), reason=f"NOT TESTED HERE: {objection()}")
def test_two_hundred_faults_leave_nothing_behind() -> None:
    chaos("--faults", "200", timeout=1100)


def write(path: Path, *lines: str) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def test_the_judge_names_lost_doubled_late_nameless_and_unanswered_calls(tmp_path: Path) -> None:
    write(
        tmp_path / "ledger-0",
        '{"token": "good", "kind": "one"}',
        '{"token": "good", "seconds": 0.1, "ranks": [1]}',
        '{"token": "lost", "kind": "all"}',
        '{"token": "lost", "seconds": 0.1, "ranks": [0, 1]}',
        '{"token": "late", "kind": "one"}',
        '{"token": "late", "seconds": 31, "ranks": [1]}',
        '{"token": "nameless", "kind": "one"}',
        '{"token": "nameless", "seconds": 0.1, "ranks": null, "error": "SupervisionError", "text": "it broke"}',
        '{"token": "private", "kind": "one"}',
        '{"token": "private", "seconds": 0.1, "ranks": null, "error": "KeyError", "text": "workers"}',
        '{"token": "named", "kind": "one"}',
        '{"token": "named", "seconds": 0.1, "ranks": null, "error": "SupervisionError", "text": "workers died"}',
        '{"token": "open", "kind": "one"}',
    )
    write(tmp_path / "ledger-1", '{"token": "cut", "kind": "one"}', '{"token": "half')
    write(tmp_path / "effects-1-100-1", "good", "late", "lost", "doubled")
    write(tmp_path / "effects-1-101-1", "doubled")
    verdict = judge(tmp_path, {"ledger-1"}, 30.0, ("workers",))
    assert sorted(line.split()[0 if "doubled" in line else 1] for line in verdict.wrong) == [
        "doubled", "late", "lost", "nameless", "open", "private",
    ]  # fmt: skip
    assert (verdict.results, verdict.errors.total(), verdict.cut_off) == (3, 3, 1)
