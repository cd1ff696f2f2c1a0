"""The controller is killed, at every stage: nothing of it is left on its host."""

import signal
from pathlib import Path

import pytest

from monarch_nb.host import folders
from tests.cluster.fault_tools import Program
from tests.polling import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
SLOW = ("call", "set-up", "idle", "broadcast", "stop")


@pytest.mark.parametrize(
    "stage", ["spawning", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("heal", *SLOW))]
)
def test_a_controller_that_is_killed_leaves_nothing(stage: str, own_place: Path) -> None:
    with Program("killed", stage) as program:
        program.line(f"at {stage}")
        assert list(own_place.iterdir())
        program.process.kill()
        assert program.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("milliseconds", [50, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 150))])
def test_an_agent_whose_controller_is_killed_while_it_starts_leaves_nothing(milliseconds: int, own_place: Path) -> None:
    before = set(own_place.iterdir())
    with Program("killed_at_the_start", milliseconds) as program:
        assert program.end() == -signal.SIGKILL
    until(lambda: set(own_place.iterdir()) <= before)


@pytest.fixture(scope="module")
def calls() -> int:
    """How many functions a controller calls until its first processes are being started."""
    with Program("killed_at_a_call", -1) as program:
        number = int(program.line("calls"))
        assert program.end() == 0
    return number


@pytest.mark.parametrize(
    "part", [0.8, *(pytest.param(twentieth / 20, marks=pytest.mark.slow) for twentieth in range(20))]
)
def test_a_controller_killed_anywhere_in_its_start_leaves_nothing(
    part: float, calls: int, own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(own_place.iterdir())
    with Program("killed_at_a_call", int(part * calls)) as program:
        assert program.end() == -signal.SIGKILL
    monkeypatch.setattr(folders, "_STALE_AFTER_S", 0.0)

    def is_swept() -> bool:
        folders.sweep(own_place)  # as the next start does
        return set(own_place.iterdir()) <= before

    until(is_swept)


def test_the_folder_of_an_agent_that_never_began_is_swept(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(own_place.iterdir())
    with Program("killed_at_the_start", "folder") as program:
        assert program.end() == -signal.SIGKILL
    remains = set(own_place.iterdir()) - before
    assert len(remains) == 1
    monkeypatch.setattr(folders, "_STALE_AFTER_S", 0.0)
    assert set(folders.sweep(own_place)) == remains
