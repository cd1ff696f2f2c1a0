"""`make bench`: the same small program on ours, on bare ZeroMQ and, with PEERS=..., on others.

Figures are valid on an idle machine only; the load of the machine is printed with them.
"""

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

from benchmarks.machine import load, processor
from benchmarks.measure import QUICK, Plan, figures_of, medians
from benchmarks.peers import PEERS, ROOT, interpreter
from benchmarks.rows import ROWS, Figures, markdown, table

HERE = Path(__file__).resolve().parent
OURS = "ours"
FLOOR, FLOOR_PROGRAM = "pyzmq", "program_pyzmq.py"  # the bare ping-pong, measured beside the calls
CALLS = "program_actors.py"
ROUNDS = 3  # of the calls, which vary most with the machine: ours and the peers' in turns, medians
SECONDS = 900  # for one program
PANEL_S = 800.0  # of which three quarters are measured: ten minutes
DEBUG = ((f"{OURS}, debugger", "program_debug.py"), (f"{OURS}, debugger of JupyterLab", "program_dap.py"))
PROGRAMS = (
    (OURS, CALLS),
    (f"{OURS}, scale", "program_scale.py"),
    (f"{OURS}, logs", "program_logs.py"),
    *DEBUG,
    (f"{OURS}, live displays", "program_faces.py"),
    (f"{OURS}, faces of kernels", "program_sight.py"),
    (f"{OURS}, page", "program_page.py"),
)
PANEL = PROGRAMS[-1:]
TENSORS = (
    (f"{OURS}, tensors", "program_tensors.py"),
    (f"{OURS}, own values of ranks", "program_ranks.py"),
    (f"{OURS}, steps of training", "program_tensors_steps.py"),
    (f"{OURS}, killed ranks of tensors", "program_tensors_faults.py"),
)
DATA = ((f"{OURS}, data", "program_data.py"), (f"{OURS}, weights and feeds", "program_sync.py"))


def run(program: str, python: str, plan: Plan, *, ours: bool) -> tuple[Figures, str]:
    """A program's figures, and what went wrong ("" when nothing did)."""
    # The others must not see our `monarch`.
    hidden = () if ours else ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    if not ours:
        env["PYTHONPATH"] = str(HERE)  # their processes import what the programs share
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, str(HERE / program), plan.encode()],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS + plan.face_s)
            wrong = "" if process.returncode == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            wrong = f"was not done after {SECONDS + plan.face_s:.0f} s"
        if not ours:  # some leave processes behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        tail = "".join(errors.readlines()[-15:])
    return figures_of(output), f"{program} {wrong}\n{tail}" if wrong else ""


def conditions(before: float) -> str:
    """The line over a table: date, machine and load."""
    today = datetime.datetime.now(datetime.UTC).strftime("%-d %B %Y")
    return (
        f"{today}, {os.cpu_count()} cores of {processor()}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}; load {before:.1f} before, {load():.1f} after. (n×): how many times "
        "better ours is."
    )


def main(argv: list[str]) -> int:
    peers = [name for name in os.environ.get("PEERS", "").replace(",", " ").split() if name]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny counts: only whether it runs")
    parser.add_argument("--data", action="store_true", help="only the data plane: RDMABuffer and its kin")
    parser.add_argument("--tensors", action="store_true", help="only sharded tensors")
    parser.add_argument("--debug", action="store_true", help="only the debugger, and sampling")
    parser.add_argument("--panel", action="store_true", help="only what displays cost, for ten minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    options = parser.parse_args(argv)
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        parser.error(f"PEERS: unknown {', '.join(unknown)}; known are {', '.join(PEERS)}")
    plan = QUICK if options.quick else Plan(face_s=PANEL_S) if options.panel else Plan()

    problems: list[str] = []
    before = load()
    pythons: dict[str, str] = {}
    for name in peers:
        try:
            pythons[name] = interpreter(name)
        except subprocess.CalledProcessError as error:
            problems.append(f"{name}: its environment cannot be made: {error}")

    def measure(title: str, program: str, python: str) -> Figures:
        print(f"measuring {title} ...", file=sys.stderr, flush=True)
        figures, wrong = run(program, python, plan, ours=python == sys.executable)
        if wrong:
            problems.append(f"{title}: {wrong}")
        return figures

    parts = ((options.data, DATA), (options.tensors, TENSORS), (options.debug, DEBUG), (options.panel, PANEL))
    only = next((programs for selected, programs in parts if selected), None)
    floor: Figures = {}
    measured: dict[str, Figures] = {OURS: {}, **{name: {} for name in peers}}
    for title, program in only or (*PROGRAMS, *DATA, *TENSORS):
        part = title.removeprefix(OURS)
        turn = [(measured[OURS], title, program, sys.executable)]
        turn += [(floor, FLOOR, FLOOR_PROGRAM, sys.executable)] if program == CALLS else []
        for name, python in pythons.items():
            if theirs := PEERS[name].get(program):
                turn.append((measured[name], name + part, theirs, python))
        rounds: list[list[Figures]] = [[] for _ in turn]
        for count in range(1 if options.quick or program != CALLS else ROUNDS):
            order = range(len(turn)) if count % 2 == 0 else reversed(range(len(turn)))
            for index in order:
                rounds[index].append(measure(*turn[index][1:]))
        for (figures, *_), several in zip(turn, rounds, strict=True):
            figures |= medians(several)

    print(table(measured, floor, only=only is not None))
    print("(n×): how many times better ours is than theirs, in this run")
    if options.quick:
        print("QUICK: fewer processes, actors and repetitions than the rows say, and numpy for torch")
    print("target: by itself, and how many times better than torchmonarch where that was measured too")
    print(f"load before {before:.1f}, after {load():.1f}, on {os.cpu_count()} cores")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": [before, load()],
        "quick": options.quick,
        "targets": {row.title: row.goal for row in ROWS if row.goal},
        "figures": {FLOOR: floor, **measured},
        "problems": problems,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    readable = options.out.with_suffix(".md")
    readable.write_text(markdown(measured, floor, conditions(before), only=only is not None) + "\n", encoding="utf-8")
    print(f"written to {options.out} and {readable}")
    for problem in problems:
        print(f"\nFAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
