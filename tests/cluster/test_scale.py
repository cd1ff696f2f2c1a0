"""As many processes and actors as a large machine has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_processes_of_10_actors_are_spawned_called_healed_and_stopped() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/program_scale.py", json.dumps({"scale": 64, "scale_actors": 10})],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for step in ("spawned", "all called", "told", "healed", "stopped"):
        assert f'"scale: {step}"' in done.stdout
