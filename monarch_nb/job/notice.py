"""What SIGTERM of an engine means to a host of a job: who ends it, and how many seconds that leaves."""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from monarch_nb.host.preemption import grace
from monarch_nb.host.protocol import Notice

_ASK_S = 3.0  # for Slurm to answer; these seconds are dear
_PAUSE_S = 0.1
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
    number, begun = os.environ.get("SLURM_JOB_ID", ""), time.monotonic()
    known = grace(os.environ)
    if number and known is None:
        asked = (("scontrol", "--oneliner", "show", "job", number), ("scontrol", "show", "config"))
        with ThreadPoolExecutor(len(asked)) as pool:
            job, settings = pool.map(_ask, asked)
        return of_slurm(number, job, settings, time.time(), time.monotonic() - begun)
    by = f"Slurm job {number}" if number else "Kubernetes" if _KUBERNETES in os.environ else "SIGTERM"
    return Notice(by=by, seconds=known)


def of_slurm(number: str, job: str, settings: str, now: float, since: float = 0.0) -> Notice:
    """The notice of a Slurm job, as `scontrol` tells of it and of its `settings`; empty texts where it does not.

    While Slurm says that the job runs, it does until its end time: that of a preemption with a grace time, or the time
    limit that SIGTERM was asked for ahead of. Else Slurm has ended it, and kills what is left KillWait after its
    SIGTERM, which came `since` seconds ago.
    """
    fields = dict(_FIELD.findall(job))
    state, end = fields.get("JobState", ""), _seconds(fields.get("EndTime", ""))
    wait = _KILL_WAIT.search(settings)
    left = None if wait is None else max(0.0, float(wait[1]) - since)
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
    """What it answers; empty if it does not. Slurm's signals come in bursts, and may end the first that is started."""
    deadline = time.monotonic() + _ASK_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left,
                                  check=False, start_new_session=True)  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return ""
        if done.returncode == 0:
            return done.stdout
        time.sleep(_PAUSE_S)
    return ""
