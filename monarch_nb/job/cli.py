"""`monarch-nb job`: the jobs of this user in a shell."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch_nb.job.adapted import AdapterJob, running_jobs
from monarch_nb.job.adapter import EngineError
from monarch_nb.job.kinds import kinds
from monarch_nb.job.named import JobsFileError, described_jobs, job_file, job_named
from monarch_nb.job.record import JobFileError, ago
from monarch_nb.job.trait import DEFAULT_JOB_PATH, JobTrait, job_load

_SHORT = 8


def main(words: Sequence[str]) -> int:
    """Does what the command line says; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="monarch-nb job",
        description="Jobs give host meshes: hosts on Slurm, Kubernetes, SSH and others. monarch.toml names them.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("ls", help="the jobs that run, and those that monarch.toml describes")
    start = verbs.add_parser("start", help="start a job of monarch.toml, and show its hosts join; Ctrl-C ends it")
    start.add_argument("job", metavar="NAME")
    attach = verbs.add_parser("attach", help="make a job that runs the one that programs in this folder find")
    kill = verbs.add_parser("kill", help="end a job, with all that runs on its hosts")
    logs = verbs.add_parser("logs", help="the last lines that the agents of a job have written")
    shell = verbs.add_parser("ssh", help="a shell on a host of a job")
    for verb in (attach, kill, logs, shell):
        verb.add_argument("job", metavar="JOB", help="its name in monarch.toml, or the beginning of its id")
    logs.add_argument("-n", dest="count", type=int, default=20, help="how many lines (default: 20)")
    for verb in (logs, shell):
        verb.add_argument("host", nargs="?", help="such as trainers_0 (default: all, or the first)")
    options = parser.parse_args(words)
    does: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls, "start": _start, "attach": _attach, "kill": _kill, "logs": _logs, "ssh": _ssh,
    }  # fmt: skip
    try:
        return does[options.verb](options)
    except (EngineError, LookupError, JobsFileError, JobFileError, RuntimeError) as error:
        sys.stderr.write(f"monarch-nb job {options.verb}: {error.args[0] if error.args else error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the job was ended\n" if options.verb == "start" else "interrupted\n")
        return 130


def _all_running() -> list[AdapterJob]:
    jobs = []
    for kind in kinds():
        try:
            jobs += running_jobs(kind)
        except EngineError as error:
            sys.stderr.write(f"{kind}: {error}\n")
    return jobs


def _ls(_: argparse.Namespace) -> int:
    rows = [("JOB", "KIND", "MESHES", "HOSTS", "STARTED")]
    running = _all_running()
    names = {}
    for name in described_jobs():
        saved = _saved(job_file(name))
        names[saved.apply_id if saved is not None else None] = name
    for job in running:
        seen = job._adapter.look(job._job)
        counts = {
            state: sum(each.state == state for each in seen.values()) for state in ("running", "waiting", "ended")
        }
        hosts = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        name = names.pop(job.apply_id, "")
        label = f"{str(job.apply_id)[:_SHORT]}{f' ({name})' if name else ''}"
        rows.append((label, job._kind, job._wishes(), hosts or "not known", ago(job._applied.started)))
    up = {row[0].partition("(")[2].rstrip(")") for row in rows}
    for name, said in described_jobs().items():
        if name not in up:
            meshes = said["meshes"] if isinstance(said["meshes"], dict) else {}
            rows.append((name, str(said["kind"]), ", ".join(meshes), "not started", "monarch-nb job start " + name))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[4]]).rstrip() + "\n")
    return 0


def _saved(path: str) -> JobTrait | None:
    try:
        return job_load(path)
    except (FileNotFoundError, JobFileError):
        return None


def _find(word: str) -> AdapterJob:
    if word in described_jobs():
        saved = _saved(job_file(word))
        if not isinstance(saved, AdapterJob):
            raise LookupError(f"{word} was not started from this folder: monarch-nb job start {word}")
        return saved
    found = [job for job in _all_running() if word and str(job.apply_id).startswith(word)]
    if len(found) != 1:
        raise LookupError(f"{len(found) or 'no'} jobs begin with {word!r}: monarch-nb job ls shows all")
    return found[0]


def _start(options: argparse.Namespace) -> int:
    job = job_named(options.job)
    job.state(job_file(options.job))
    running = job._running
    if isinstance(running, AdapterJob):
        began = time.monotonic()
        try:
            running.wait(tell=lambda progress: sys.stdout.write(f"{progress.bar()}\n"))
        except KeyboardInterrupt:
            raise
        except Exception:
            running.kill()
            raise
        sys.stdout.write(f"{options.job} runs, after {time.monotonic() - began:.1f} s\n")
    sys.stdout.write(
        f"In a notebook: %mesh NAME --job {options.job}. In Python:\n"
        f"  from monarch.job import job_load; state = job_load({job_file(options.job)!r}).state()\n"
    )
    sys.stdout.flush()
    return 0


def _attach(options: argparse.Namespace) -> int:
    job = _find(options.job)
    if Path(DEFAULT_JOB_PATH).exists():
        sys.stdout.write(f"{DEFAULT_JOB_PATH} named another job, which runs on\n")
    job.dump(DEFAULT_JOB_PATH)
    sys.stdout.write(
        f"Programs in this folder find it: from monarch.job import job_load; state = job_load().state()\n{job}\n"
    )
    return 0


def _kill(options: argparse.Namespace) -> int:
    job = _find(options.job)
    what = job._described()
    job.kill()
    sys.stdout.write(f"ended: {what}\n")
    return 0


def _logs(options: argparse.Namespace) -> int:
    job = _find(options.job)
    names = [options.host] if options.host else list(job._agents)
    for name in names:
        if name not in job._agents:
            raise LookupError(f"there is no host {name!r}: there are {', '.join(job._agents)}")
        for line in job._adapter.lines(job._job, name, options.count):
            sys.stdout.write(f"{f'[{name}] ' if len(names) > 1 else ''}{line}\n")
    return 0


def _ssh(options: argparse.Namespace) -> int:
    job = _find(options.job)
    name = options.host or next(iter(job._agents), "")
    if name not in job._agents:
        raise LookupError(f"there is no host {name!r}: there are {', '.join(job._agents)}")
    line = job._adapter.shell(job._job, name)
    sys.stdout.write(f"{' '.join(line)}\n")
    sys.stdout.flush()
    os.execvp(line[0], line)
