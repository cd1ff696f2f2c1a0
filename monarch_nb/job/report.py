"""The folder of a job: the list of hosts and the reports of agents there, requests to helpers, and its removal."""

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from monarch_nb._package import __version__
from monarch_nb.host.gpus import devices
from monarch_nb.host.linux import boot_id
from monarch_nb.job.adapter import JOB_FILE, PREFIX, AgentsWanted, EngineError, JobAdapter, Running, Seen, kept_jobs
from monarch_nb.wire import json_decoder

HELLO = '{"monarch-nb helper":'  # begins the first line, after any output of a login shell
KEPT_S = 86400.0  # how long the logs of a job that has ended by itself are kept, unless they are removed by request
_SECONDS = 60.0
_HALF_MADE_S = 3600.0  # age of a folder without a job, of a program that was killed as it started one
_USED = "used"  # the file that is locked
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class WantedHost(msgspec.Struct, frozen=True):
    """A host in the list of a job's hosts, which their starter writes."""

    name: str
    env: dict[str, str] = {}


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One agent that listens."""

    host: str  # the id of its host
    pid: int  # of its worker
    joins: tuple[str, ...]  # addresses to reach it, the likeliest first
    machine: str
    boot: str  # the same for all that runs on one machine
    python: str
    version: str
    gpus: int
    ended: str = ""  # how its agent ended, other than by a shutdown


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the helper of a machine, about the agents of one job on this machine."""

    do: Literal["start", "look", "kill", "end", "lines"]
    job: str
    names: dict[str, dict[str, str]] = {}  # start: the environment of each; end: the agents to end
    address: str = "tcp://0.0.0.0:0"  # start: where the agents listen
    known_as: str = ""  # start: the requester's name of this machine
    key: str = ""  # start: the job's key, as in its file
    count: int = 0  # lines
    bound: bool = False  # start: agents end with this process
    keep_s: float | None = None  # start: how long agents live on when no program uses them


class HelperReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The helper's answer; `error` if it failed."""

    seen: dict[str, Seen] = {}
    lines: dict[str, list[str]] = {}
    error: str = ""


def report(host: str, joins: tuple[str, ...]) -> AgentReport:
    """Returns the report of an agent on this machine, whose worker is this process."""
    return AgentReport(host=host, pid=os.getpid(), joins=joins, machine=platform.node(), boot=boot_id(),
                  python=sys.version.split()[0], version=__version__, gpus=len(devices()))  # fmt: skip


def write_report(path: Path, content: AgentReport) -> None:
    """Writes a report to a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


def read_report(path: Path) -> AgentReport | None:
    """Reads the report in a file; None while there is none."""
    try:
        return json_decoder(AgentReport).decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def own_addresses(port: int, known_as: str = "") -> tuple[str, ...]:
    """Returns addresses of a port of this machine for others: the name it is known as, its own name, its addresses."""
    names = [known_as, socket.getfqdn(), platform.node(), *_numbers()]
    usable = [name for name in names if name and not name.startswith(("localhost", "127.")) and name != "::1"]
    return tuple(f"tcp://{f'[{name}]' if ':' in name else name}:{port}" for name in dict.fromkeys(usable))


def _numbers() -> list[str]:
    """Returns IP addresses from which this machine would connect to others, without sending anything."""
    addresses = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                addresses.append(probe.getsockname()[0])
        except OSError:
            continue
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return addresses
    return addresses + [str(entry[4][0]).partition("%")[0] for entry in entries]


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


class FolderUse:
    """Use of a job's folder, until this is closed, or nothing refers to `owner` any more."""

    def __init__(self, owner: object, folder: str) -> None:
        self.folder = folder
        fd = os.open(Path(folder, _USED), _OPEN, 0o600)
        with contextlib.suppress(OSError):  # no locks on that file system
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._closing = weakref.finalize(owner, os.close, fd)
        _uses.add(self)

    def close(self) -> None:
        """Ends this owner's use of the folder."""
        self._closing()


_uses: weakref.WeakSet[FolderUse] = weakref.WeakSet()


def end_uses(folder: str) -> None:
    """Ends the use of a folder by all objects of this process, as its job was killed."""
    for use in tuple(_uses):
        if use.folder == folder:
            use.close()


def tidy_soon(kind: str, adapter: JobAdapter) -> None:
    """Removes leftovers of jobs of a kind in the background; logs of the last day remain."""
    threading.Thread(target=lambda: list(tidied(kind, adapter)), name="monarch-job-tidy", daemon=True).start()


def tidied(kind: str, adapter: JobAdapter, keep_s: float = KEPT_S, report: Callable[[str], object] = lambda text: None
           ) -> Iterator[Running]:  # fmt: skip
    """Removes leftovers of jobs of a kind that have ended: keys at once, all else after `keep_s` seconds.

    Yields those of which nothing is left. `report` is called with a text for each failure. Blocks while the
    scheduler is asked, unless there are no leftovers of its jobs here.
    """
    try:
        jobs = kept_jobs(adapter.folder(), kind)
    except OSError as error:
        report(f"{kind}: {error}")
        return
    for job in jobs.values():
        try:
            if _tidied(adapter, job, keep_s):
                yield job
        except Exception as error:  # errors of the scheduler
            report(f"{kind} job {job.job[:8]} stays as it is: {error}")
    _sweep_half_made(adapter.folder())


def _tidied(adapter: JobAdapter, job: Running, keep_s: float) -> bool:
    folder = Path(job.folder)
    with _unused(folder) as free:
        if not free or any(state.state != "ended" for state in adapter.look(job).values()):
            return False
        if time.time() - newest(folder) < keep_s:
            (folder / "key").unlink(missing_ok=True)
            return False
        adapter.kill(job)  # removes its remains at the scheduler and on its machines
        shutil.rmtree(folder, ignore_errors=True)
        return True


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Yields whether no process uses a job; if so, none can start to use it within the context."""
    try:
        fd = os.open(folder / _USED, _OPEN, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:  # no locks on that file system
        free = time.time() - newest(folder) > KEPT_S
    try:
        yield free
    finally:
        os.close(fd)


def newest(folder: Path) -> float:
    """Returns the time of the last change in a folder, other than of the lock."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.name not in (_USED, "key"):
                times.append(path.lstat().st_mtime)
    return max(times[1:], default=times[0])


def _sweep_half_made(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            own = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
            if own and not (path / JOB_FILE).exists() and time.time() - newest(path) > _HALF_MADE_S:
                with _unused(path) as free:
                    if free:
                        shutil.rmtree(path, ignore_errors=True)
