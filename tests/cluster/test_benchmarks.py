"""`make bench` runs and reports its measurements; speed is not tested."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import figures_of
from benchmarks.rows import ROWS
from scripts.processes import MARK, left_behind
from tests.browser.lab import browser_path

ROOT = Path(__file__).resolve().parents[2]
# Beginnings of figures that --quick leaves out: of a page, of other kernels, of many stops, of tensors as arguments.
LONGER = (
    "page: ",
    "faces: heap",
    "faces: kernel",
    "faces: messages",
    "faces: page",
    "sight: ",
    "dap: 64",
    "64 MB tensor",
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_benchmark_measures_every_row_and_leaves_no_process(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    env = {**os.environ, "PEERS": "", MARK: mark}
    written = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(written)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(written.read_text(encoding="utf-8"))
    assert set(report["figures"]) == {"pyzmq", "ours"}
    assert set(report["figures"]["pyzmq"]) == {"ping-pong"}
    missing = {row.source for row in ROWS} - {"ping-pong"} - set(report["figures"]["ours"])
    assert {source for source in missing if not source.startswith(LONGER)} == set()
    readable = written.with_suffix(".md").read_text(encoding="utf-8")
    for title in report["targets"]:
        assert title in done.stdout
        assert f"| {title} |" in readable
    assert left_behind(mark) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_live_displays_are_measured_in_a_real_page() -> None:
    browser_path()
    program = ROOT / "benchmarks" / "program_page.py"
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            json.dumps({"face_ranks": 64, "face_events": 500, "face_s": 3, "face_rounds": 1}),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = figures_of(done.stdout)
    assert {"faces: kernel", "faces: page", "faces: heap", "page: busy, mesh", "page: killed, mesh"} <= set(figures)
    assert figures["faces: kernel"]["rate"] > 0
    # To the mesh, the failures and the panel ten deltas a second; to the timeline and the history next to nothing.
    assert 0 < figures["faces: messages"]["rate"] < 40
    assert 0 < figures["faces: messages"]["bars"] < 3000


def test_an_unknown_peer_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks"],
        cwd=ROOT,
        env={**os.environ, "PEERS": "nobody"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "known are torchmonarch, ray" in done.stderr
