"""`monarch-nb job`: the jobs of this user in a shell."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from monarch_nb._package import more
from monarch_nb.job.adapter import EngineError, Running, adapter_of, kinds
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.named import (
    SHORT,
    JobsFileError,
    described_jobs,
    find_job,
    job_file,
    job_named,
    listed_jobs,
    saved_job,
    wrong_jobs,
)
from monarch_nb.job.record import JobFileError, ago
from monarch_nb.job.report import KEPT_S, tidied
from monarch_nb.job.trait import DEFAULT_JOB_PATH
from monarch_nb.settings import format_duration

_KEEP = "8h"  # jobs started in a shell are used later


def main(words: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="monarch-nb job",
        description="Jobs give host meshes: hosts on Slurm, Kubernetes, SSH and others. monarch.toml names them.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    parser.set_defaults(verb="ls")  # the default
    verbs.add_parser("ls", aliases=["list"], help="the jobs that run, and those that monarch.toml describes")
    start = verbs.add_parser("start", help="start a job of monarch.toml, and show its hosts join; Ctrl-C ends it")
    start.add_argument("job", metavar="NAME")
    start.add_argument(
        "--keep", metavar="TIME", help=f"end it once no program has used it for so long (default: {_KEEP})"
    )
    attach = verbs.add_parser("attach", help="make a job that runs the one that programs in this folder find")
    kill = verbs.add_parser("kill", help="end a job, with all that runs on its hosts")
    logs = verbs.add_parser("logs", help="the last lines that the agents of a job have written")
    shell = verbs.add_parser("ssh", help="a shell on a host of a job")
    verbs.add_parser("tidy", help="remove what is left of jobs that ended by themselves: folders, keys, logs")
    for verb in (attach, kill, logs, shell):
        verb.add_argument("job", metavar="JOB", help="its name in monarch.toml, or the beginning of its id")
    logs.add_argument("-n", dest="count", type=int, default=20, help="how many lines (default: 20)")
    for verb in (logs, shell):
        verb.add_argument("host", nargs="?", help="such as trainers_0 (default: all, or the first)")
    options = parser.parse_args(words)
    does: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls, "start": _start, "attach": _attach, "kill": _kill, "logs": _logs, "ssh": _ssh, "tidy": _tidy,
    }  # fmt: skip
    try:
        return does["ls" if options.verb == "list" else options.verb](options)
    except BrokenPipeError:
        raise
    except (EngineError, LookupError, JobsFileError, JobFileError, RuntimeError, ValueError, OSError) as error:
        message = error.args[0] if isinstance(error, LookupError) and error.args else error
        sys.stderr.write(f"monarch-nb job {options.verb}: {message}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the job was ended\n" if options.verb == "start" else "interrupted\n")
        return 130


def _tidy(_: argparse.Namespace) -> int:
    removed = False
    for job in _leftovers(0.0, _complain):
        removed = True
        sys.stdout.write(f"removed: {job.kind} job {job.job[:SHORT]}, started {ago(job.started)}\n")
    for path in (Path(DEFAULT_JOB_PATH), *Path(job_file("")).parent.glob("*.json")):
        if _names_nothing(str(path)):
            removed = True
            path.unlink(missing_ok=True)
            sys.stdout.write(f"removed: {path}, whose job is gone\n")
    if not removed:
        sys.stdout.write("nothing is left of jobs that ended by themselves\n")
    return 0


def _leftovers(keep_s: float, report: Callable[[str], object]) -> Iterator[Running]:
    """Yields the jobs of all kinds that ended by themselves and of which nothing is left now."""
    for kind in kinds():
        try:
            yield from tidied(kind, adapter_of(kind), keep_s, report)
        except (EngineError, ImportError) as error:
            report(f"{kind}: {error}")


def _names_nothing(path: str) -> bool:
    """Returns whether the job of a file has no folder any more, and so no hosts."""
    try:
        job = saved_job(path)
    except JobFileError as error:
        sys.stderr.write(f"{path}: {error}\n")
        return False
    return isinstance(job, AdapterJob) and job.active and bool(job._folder) and not os.path.isdir(job._folder)


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _ls(_: argparse.Namespace) -> int:
    list(_leftovers(KEPT_S, lambda text: None))
    rows = [("JOB", "KIND", "MESHES", "HOSTS", "STARTED")]
    described, wrong = described_jobs(), wrong_jobs()
    running = listed_jobs(_complain)
    rows += [(job.label, job.kind, job.meshes, job.hosts, job.started) for job in running]
    up = {job.name for job in running}
    for name, table in described.items():
        if name not in up and name not in wrong:
            meshes = table["meshes"] if isinstance(table["meshes"], dict) else {}
            rows.append((name, str(table["kind"]), ", ".join(meshes), "not started", "monarch-nb job start " + name))
    if len(rows) == 1 and not wrong:
        sys.stdout.write(
            "no job runs, and there is no monarch.toml here that describes one: a program or cell starts one, as "
            f"SlurmJob({{'trainers': 4}}).apply() or %mesh NAME --job KIND do{more('guides/jobs.md')}\n"
        )
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows if len(rows) > 1 else ():
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[4]]).rstrip() + "\n")
    for problem in wrong.values():
        sys.stderr.write(f"monarch-nb job ls: {problem}\n")
    return int(bool(wrong))


def _find_living(word: str) -> AdapterJob:
    job = find_job(word)
    lost = job._lost()
    if lost:
        raise LookupError(f"{word} is gone: {lost}\nStart it anew: monarch-nb job start {word}")
    return job


def _start(options: argparse.Namespace) -> int:
    job = job_named(options.job)
    keep = options.keep or ("" if "keep" in described_jobs()[options.job] else _KEEP)
    if keep and isinstance(job, AdapterJob) and (options.keep or job.can_end_itself):
        job.keep_for(keep)
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
        if running.keep is not None:
            duration = format_duration(round(running.keep * 1e9))
            sys.stdout.write(f"It ends by itself once no program has used it for {duration} (--keep), or with: "
                             f"monarch-nb job kill {options.job}\n")  # fmt: skip
    sys.stdout.write(
        f"In a notebook: %mesh NAME --job {options.job}. In Python:\n"
        f"  from monarch.job import job_load; state = job_load({job_file(options.job)!r}).state()\n"
    )
    sys.stdout.flush()
    return 0


def _attach(options: argparse.Namespace) -> int:
    job = _find_living(options.job)
    if Path(DEFAULT_JOB_PATH).exists():
        sys.stdout.write(f"{DEFAULT_JOB_PATH} named another job, which runs on\n")
    job.dump(DEFAULT_JOB_PATH)
    sys.stdout.write(
        f"Programs in this folder find it: from monarch.job import job_load; state = job_load().state()\n{job}\n"
    )
    return 0


def _kill(options: argparse.Namespace) -> int:
    job = find_job(options.job)
    description = job._describe()
    job.kill()
    sys.stdout.write(f"ended: {description}\n")
    return 0


def _logs(options: argparse.Namespace) -> int:
    job = find_job(options.job)
    names = [options.host] if options.host else list(job._agents)
    for name in names:
        if name not in job._agents:
            raise LookupError(f"there is no host {name!r}: there are {', '.join(job._agents)}")
        for line in job._adapter.lines(job._job, name, options.count) or ["(its agent has written nothing)"]:
            sys.stdout.write(f"{f'[{name}] ' if len(names) > 1 else ''}{line}\n")
    return 0


def _ssh(options: argparse.Namespace) -> int:
    job = _find_living(options.job)
    name = options.host or next(iter(job._agents), "")
    if name not in job._agents:
        raise LookupError(f"there is no host {name!r}: there are {', '.join(job._agents)}")
    line = job._adapter.shell(job._job, name)
    sys.stdout.write(f"{' '.join(line)}\n")
    sys.stdout.flush()
    os.execvp(line[0], line)
