"""The reports about hosts, from the states of their Slurm jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.job import slurm
from monarch_nb.job.adapter import Agent, Running, deduplicated
from monarch_nb.job.arrival import HostsMissingError

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("states", "reason", "words"),
    [
        (["FAILED"], "NonZeroExitCode", "has failed"),
        (["FAILED", "COMPLETING"], "NonZeroExitCode", "has failed"),
        ("COMPLETING", "NonZeroExitCode", "has failed"),
        ("COMPLETING", "TimeLimit", "has reached its time limit"),
        ("COMPLETING", "None", "is ending"),
        (["RUNNING", "COMPLETING"], "None", "is ending"),
        ("CANCELLED", "None", "was cancelled"),
        ("PREEMPTED", "Preempted", "was preempted by another job (Preempted)"),
    ],
)
def test_hosts_of_a_completing_job_are_lost_for_the_jobs_reason(
    states: Any, reason: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = json.dumps({"jobs": [{"job_id": 7, "job_state": states, "state_reason": reason}]})
    monkeypatch.setattr(slurm, "ask", lambda *_: text)
    status = slurm.Slurm().look(Running("trainers", str(tmp_path), {"trainers_0": Agent("7/0")}))["trainers_0"]
    assert (status.state, status.description) == ("ended", f"is gone: Slurm job 7 {words}")


def test_the_last_lines_of_a_batch_job_are_shown_once() -> None:
    long = "is gone: Slurm job 5 was cancelled\n  | slurmstepd: error\n  | bye"
    short = "is gone: Slurm job 6 was cancelled\n  | bye"
    missing = {"a_0": long, "a_1": long, "a_2": short, "a_3": "is gone", "a_4": "is gone", "a_5": long}
    assert deduplicated(missing) == {
        "a_0": long,
        "a_1": "is gone: Slurm job 5 was cancelled, as a_0 is",
        "a_2": short,
        "a_3": "is gone",
        "a_4": "is gone",
        "a_5": "is gone: Slurm job 5 was cancelled, as a_0 is",
    }
    assert str(HostsMissingError("a (SlurmJob 7)", missing)).count("slurmstepd") == 1
