"""`make compare`: the five programs on each system, one after the other, each in an environment of its own."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.compare.lines import lines_of
from benchmarks.compare.report import markdown
from benchmarks.machine import load, processor
from benchmarks.peers import ROOT, interpreter

HERE = Path(__file__).resolve().parent
SECONDS = 180  # for one program
OURS = "ours"
SYSTEMS = (OURS, "torchmonarch", "ray", "dask", "ipyparallel", "jupyter-distributed")
STORIES = {"evaluation": 4, "training": 4, "parameters": 4, "broken_rank": 8, "elastic": 4}  # and how many ranks
Facts = dict[str, Any]


def program_of(story: str, system: str) -> "Path | None":
    """A system's own program, or the one of the API that ours and torchmonarch share; None where it cannot do that."""
    names = [system.replace("-", "_"), *(["monarch"] if system in (OURS, "torchmonarch") else [])]
    return next((path for name in names if (path := HERE / story / f"on_{name}.py").exists()), None)


def run(story: str, system: str, program: Path) -> Facts:
    """The facts that a program printed, and "wrong" where it did not end well."""
    python = sys.executable if system == OURS else interpreter(system)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PYTHONPATH": str(HERE), "PATH": f"{Path(python).parent}{os.pathsep}{env['PATH']}"}
    command = [python, str(program)]
    if system == "jupyter-distributed":
        command = [python, str(HERE / "cells.py"), str(program), str(STORIES[story])]
    facts: Facts = {"lines": lines_of(program.read_text())}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            facts["wrong"] = f"not done after {SECONDS} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # some leave processes behind
        errors.seek(0)
        if process.returncode and "wrong" not in facts:
            facts["wrong"] = f"ended with status {process.returncode}: " + "".join(errors.readlines()[-12:])
    for line in output.splitlines():
        if line.startswith('{"fact"'):
            entry = json.loads(line)
            facts[entry["fact"]] = entry["value"]
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compare", description=__doc__)
    parser.add_argument("--out", default="build/compare.json")
    parser.add_argument("--turns", type=int, default=3, help="how often each program runs; the best figures count")
    parser.add_argument("systems", nargs="*", default=SYSTEMS)
    options = parser.parse_args()
    environment = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load before": round(load(), 2),
    }
    runs: dict[str, dict[str, list[Facts]]] = {story: {} for story in STORIES}
    for turn in range(options.turns):
        for story in STORIES:
            for system in options.systems:
                program = program_of(story, system)
                if program is None:
                    continue
                print(f"{turn + 1} of {options.turns}: {story} on {system}", file=sys.stderr, flush=True)
                runs[story].setdefault(system, []).append(run(story, system, program))
    out = ROOT / options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1))
    text = markdown(environment, runs, options.systems)
    out.with_suffix(".md").write_text(text)
    print(text)
    failed = [f"{story} on {system}" for story in runs for system, turns in runs[story].items() if "wrong" in turns[-1]]
    for name in failed:
        print(f"did not end well: {name}", file=sys.stderr)
    return 1 if any(name.endswith(f" on {OURS}") for name in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
