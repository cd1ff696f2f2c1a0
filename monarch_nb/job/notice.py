"""What SIGTERM of an engine means to a host of a job: who ends it, and how many seconds that leaves."""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime

from monarch_nb.host.preemption import grace
from monarch_nb.host.protocol import Notice

_ASK_S = 3.0  # for Slurm to answer; these seconds are dear
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_FIELD = re.compile(r"(\w+)=(\S*)")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
_ENDS = {
    "TIMEOUT": "has reached its time limit",
    "CANCELLED": "was cancelled",
    "PREEMPTED": "is preempted",
    "DEADLINE": "has reached its deadline",
}
_REASONS = {"TimeLimit": "has reached its time limit"}


def of_engine() -> Notice:
    """The notice that this process has just been given; asks Slurm, if that has started it, for a few seconds."""
    number = os.environ.get("SLURM_JOB_ID", "")
    known = grace(os.environ)
    if number and known is None:
        job, settings = (_ask(["scontrol", *words]) for words in (("--oneliner", "show", "job", number),
                                                                  ("show", "config")))  # fmt: skip
        return of_slurm(number, job, settings, time.time())
    by = f"Slurm job {number}" if number else "Kubernetes" if _KUBERNETES in os.environ else "SIGTERM"
    return Notice(by=by, seconds=known)


def of_slurm(number: str, job: str, settings: str, now: float) -> Notice:
    """The notice of a Slurm job, as `scontrol` tells of it and of its `settings`; empty texts where it does not.

    While Slurm says that the job runs, it does until its end time: that of a preemption with a grace time, or the time
    limit that SIGTERM was asked for ahead of. Else Slurm has ended it, and kills what is left after KillWait.
    """
    fields = dict(_FIELD.findall(job))
    state, end = fields.get("JobState", ""), _seconds(fields.get("EndTime", ""))
    wait = _KILL_WAIT.search(settings)
    left = None if wait is None else float(wait[1])
    preempted = "is preempted" if _seconds(fields.get("PreemptTime", "")) is not None else ""
    how = _ENDS.get(state) or _REASONS.get(fields.get("Reason", "")) or preempted or "is being ended"
    if state == "RUNNING":
        left = None if end is None else max(0.0, end - now)
        how = preempted or "ends soon"
    return Notice(by=f"Slurm job {number} {how}", seconds=left)


def _seconds(text: str) -> float | None:
    """A time as Slurm writes it, in the time zone of this machine; None where there is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _ask(line: Sequence[str]) -> str:
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S,
                              check=False)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
