"""The controller is killed, at every stage: nothing of it is left on its host."""

import signal
from pathlib import Path

import pytest

from tests.cluster.fault_tools import Program

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.mark.parametrize("stage", ["spawning", "set-up", "idle", "call", "broadcast", "heal", "stop"])
def test_a_controller_that_is_killed_leaves_nothing(stage: str, own_place: Path) -> None:
    with Program("killed", stage) as program:
        program.line(f"at {stage}")
        assert list(own_place.iterdir())
        program.process.kill()
        assert program.process.wait(10) == -signal.SIGKILL
