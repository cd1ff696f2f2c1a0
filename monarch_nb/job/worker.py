"""One host of a job: a process that runs a host agent at an address, or at any port, which it reports."""

import argparse
import os
import pwd
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import msgspec

from monarch_nb.connect import run_worker_until_killed
from monarch_nb.host.preemption import END, grace
from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.job.report import WantedHost, own_addresses, read_report, report, write_report
from monarch_nb.wire import json_decoder

ANY = "tcp://0.0.0.0:0"
_LARGEST = 4096
_LAUNCHER_S = 1.0
_ASK_S = 3.0  # for Slurm to answer; the grace time is short
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


def main(argv: Sequence[str]) -> int:
    """Runs a worker until its host is shut down, or killed."""
    parser = argparse.ArgumentParser(prog="python -m monarch_nb.job.worker", description=__doc__)
    parser.add_argument(
        "address", nargs="?", default=ANY, help="where to listen (default: any port, which is reported)"
    )
    parser.add_argument("--key", help="the file with the job's key; - reads it from stdin")
    parser.add_argument("--report", type=Path, help="the file for the report of where this agent is reached")
    parser.add_argument("--folder", type=Path, help="the job's folder, which all hosts share: it has the key")
    parser.add_argument("--wanted", default="wanted.json", help="the file in it that lists the hosts by rank")
    parser.add_argument("--rank-from", default="", help="environment variables that may say which of them this is")
    parser.add_argument("--known-as", default="", help="the name by which others know this machine")
    parser.add_argument("--keep", type=float, help="end once no program has used this host for so many seconds")
    parser.add_argument("--bound", action="store_true", help="end with the process that has started this one")
    arguments = parser.parse_args(argv)
    key, report_file = arguments.key, arguments.report
    if arguments.folder is not None:
        rank = next(int(os.environ[name]) for name in arguments.rank_from.split(",") if name in os.environ)
        me = json_decoder(list[WantedHost]).decode((arguments.folder / arguments.wanted).read_bytes())[rank]
        os.environ.update(me.env)
        key, report_file = arguments.folder / "key", arguments.folder / f"{me.name}.json"
    if arguments.bound or arguments.folder is not None:
        threading.Thread(target=_end_with, args=(os.getppid(),), name="monarch-launcher", daemon=True).start()
    _name_user()
    _work(arguments.address, _secret(key), report_file, os.path.expandvars(arguments.known_as), arguments.keep)
    return 0


def _name_user() -> None:
    """Sets USER and HOME for a user without an entry in the container's list of users."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", str(os.getuid()))
        if not os.access(os.environ.get("HOME", "/"), os.W_OK):
            os.environ["HOME"] = tempfile.gettempdir()


def _end_with(launcher: int) -> None:
    """Ends this process when the launcher on this machine has ended without a signal."""
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_S)
    os.kill(os.getpid(), END)


def _secret(key: "str | Path | None") -> bytes | Path | None:
    """Returns the key; content for a link into a read-only mount, whose mode the launcher decides."""
    if key == "-":
        return sys.stdin.buffer.read(_LARGEST)
    if key is None:
        return None
    path = Path(key)
    return path.read_bytes() if path.is_symlink() else path


def _work(address: str, key: bytes | Path | None, report_file: Path | None, known_as: str, keep: float | None) -> None:
    host, _, port = address.rpartition(":")
    joins: tuple[str, ...] = (address,)
    if port == "0":
        door = socket.create_server((host.removeprefix("tcp://"), 0))
        joins, address = own_addresses(door.getsockname()[1], known_as), f"{host}:fd{door.detach()}"
    elif host.startswith("tcp://"):
        joins = own_addresses(int(port), known_as)

    if report_file is not None:
        report_file.unlink(missing_ok=True)  # of an earlier worker, whose job was requeued

    def ready(host: str) -> None:
        if report_file is not None:
            write_report(report_file, report(host, joins))

    try:
        run_worker_until_killed(address, key, ready=ready, unused_s=keep, find_out=_of_engine)
    except RuntimeError as error:  # its scheduler reports it only once all of the batch job has ended
        if report_file is not None:
            previous = read_report(report_file) or report("", ())
            write_report(report_file, msgspec.structs.replace(previous, ended=str(error)))
        raise


def _of_engine() -> PreemptionNotice:
    """Returns the notice that this process has just got; asks Slurm, if that has started it."""
    number, begun = os.environ.get("SLURM_JOB_ID", ""), time.monotonic()
    seconds = grace(os.environ)
    if number and seconds is None:
        commands = (("scontrol", "--oneliner", "show", "job", number), ("scontrol", "show", "config"))
        with ThreadPoolExecutor(len(commands)) as pool:
            job, settings = pool.map(_ask, commands)
        return of_slurm(number, job, settings, time.time(), time.monotonic() - begun)
    by = f"Slurm job {number}" if number else "Kubernetes" if _KUBERNETES in os.environ else "SIGTERM"
    return PreemptionNotice(by=by, seconds=seconds)


def of_slurm(number: str, job: str, settings: str, now: float, since: float = 0.0) -> PreemptionNotice:
    """Returns the notice of a Slurm job according to `scontrol` and its `settings`; empty texts for what is unknown.

    While Slurm reports the job as running, it runs until its end time: that of a preemption with a grace time, or the
    time limit, before which SIGTERM was requested. Else Slurm has ended it, and kills the rest KillWait after its
    SIGTERM, which came `since` seconds ago.
    """
    fields = dict(_FIELD.findall(job))
    state, end = fields.get("JobState", ""), _seconds(fields.get("EndTime", ""))
    wait = _KILL_WAIT.search(settings)
    remaining = None if wait is None else max(0.0, float(wait[1]) - since)
    preempted = "is preempted" if _seconds(fields.get("PreemptTime", "")) is not None else ""
    reason = _ENDS.get(state) or _REASONS.get(fields.get("Reason", "")) or preempted or "is being ended"
    if state == "RUNNING":
        remaining = None if end is None else max(0.0, end - now)
        reason = preempted or "ends soon"
    return PreemptionNotice(by=f"Slurm job {number} {reason}", seconds=remaining)


def _seconds(text: str) -> float | None:
    """Parses a time of Slurm, in the time zone of this machine; None if there is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _ask(line: Sequence[str]) -> str:
    """Returns the output of a command, or "". Repeated, as Slurm's bursts of signals may end the first one."""
    deadline = time.monotonic() + _ASK_S
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=remaining,
                                  check=False, start_new_session=True)  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return ""
        if done.returncode == 0:
            return done.stdout
        time.sleep(_PAUSE_S)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
