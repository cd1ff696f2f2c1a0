"""The JupyterLab panel has tests of its own, in TypeScript."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_the_panels_own_tests_pass() -> None:
    done = subprocess.run(["scripts/panel", "test"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    if "SKIP JupyterLab panel" in done.stderr:
        pytest.skip(done.stderr.strip().partition("\n")[0])
