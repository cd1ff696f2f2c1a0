"""Files of jobs on a disk without room."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_nb.job import Agent, Running
from monarch_nb.job.adapter import state_folder
from monarch_nb.job.helper import Helper
from monarch_nb.job.report import Ask

pytestmark = pytest.mark.timeout(30)


@contextmanager
def no_room() -> Iterator[None]:
    """Within the context nothing can be written to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_job_that_cannot_be_written_names_its_file_and_stays(tmp_path: Path) -> None:
    job = Running("7", str(tmp_path), {"trainers_0": Agent("1")})
    job.save()
    with no_room(), pytest.raises(OSError, match=f"'{tmp_path}/job.json'") as caught:
        Running("7", str(tmp_path), {}).save()
    assert caught.value.errno == errno.EFBIG
    assert job.now() == job
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_a_machine_without_room_still_knows_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = state_folder() / "mnb-agents-7"
    folder.mkdir()
    ended = {name: Agent("999999999@1") for name in ("trainers_0", "trainers_1")}
    Helper()._list(folder, ended, ())
    with no_room():
        assert Helper().answer(Ask(do="end", job="7", names={"trainers_0": {}})).error == ""
    reply = Helper().answer(Ask(do="look", job="7"))
    assert (reply.error, "trainers_1" in reply.seen) == ("", True)
