"""The folder of a job, shared by its hosts: the secret, the list of hosts, and the report of each agent."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from monarch_nb.job.adapter import AgentsWanted, EngineError, Running, Seen
from monarch_nb.job.report import WantedHost, read_report

_SECONDS = 60.0


def prepare(wanted: AgentsWanted, names: Sequence[str], file: str) -> None:
    """Writes the secret and the list of these hosts by rank, with their environments; for this user alone."""
    wanted.secret  # noqa: B018 - makes the file
    hosts = [WantedHost(name, wanted.environment_of(name)) for name in names]
    path = wanted.folder / file
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(hosts))


def worker_line(wanted: AgentsWanted, file: str, rank_from: str, known_as: str = "") -> str:
    """Returns the shell command of an agent of the job, the same for all hosts."""
    port = int(wanted.options.get("port", 0))
    bind = wanted.options.get("bind_to") or "0.0.0.0"
    words = [
        str(wanted.options.get("python", "python3")), "-P", "-m", "monarch_nb.job.worker", f"tcp://{bind}:{port}",
        "--folder", str(wanted.folder), "--wanted", file, "--rank-from", rank_from, "--known-as", known_as,
        *([] if wanted.keep_s is None else ["--keep", str(wanted.keep_s)]),
    ]  # fmt: skip
    return shlex.join(words)


def seen_of(job: Running, name: str, suffix: str) -> Seen:
    """Returns the state of an agent that its scheduler lists as running, with its own report."""
    report = read_report(Path(job.folder, f"{name}.json"))
    if report is None:
        return Seen("running", f"runs{suffix}, without a report yet of where it listens")
    if report.ended:
        return Seen("ended", f"is gone, on {report.machine}{suffix}: {report.ended}")
    return Seen("running", f"on {report.machine}{suffix}", report.joins, report.gpus, report.host)


def refresh_folder(folder: str) -> None:
    """Makes a network file system refresh a folder."""
    try:
        os.listdir(folder)
    except OSError:
        pass


def last_lines(paths: Sequence[Path], count: int) -> list[str]:
    """Returns the last lines of the first of these files that has any."""
    for path in paths:
        try:
            lines = path.read_text(errors="replace").strip().splitlines()
        except OSError:
            continue
        if lines:
            return lines[-count:]
    return []


def ask(
    line: Sequence[str], package: str, stdin: str = "", env: Mapping[str, str] | None = None, seconds: float = _SECONDS
) -> str:
    """Returns the output of a scheduler's command. Raises EngineError with its message.

    Ctrl-C in a terminal does not reach the command, which runs to its end whatever stops the wait for it.
    """
    try:
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=None if env is None else dict(env), start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise EngineError(f"there is no command {line[0]} here: {package}") from None
    try:
        out, err = process.communicate(stdin, seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise EngineError(f"{line[0]} has not answered within {seconds:g} s") from None
    if process.returncode:
        words = (err or out).strip() or f"it ended with status {process.returncode}"
        raise EngineError(f"{line[0]}: {words}")
    return out
