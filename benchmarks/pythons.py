"""`make bench-pythons`: the same program on each available Python, in environments of their own, without PyTorch.

python -m benchmarks.pythons [VERSION ...]

A Python that cannot be found is named in a loud line; PYTHON_3_14=/path names one. The rounds take turns.
"""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import run
from benchmarks.machine import load, processor
from benchmarks.measure import Plan
from benchmarks.peers import ROOT
from benchmarks.rows import ROWS, Figures, Row, number
from scripts.matrix import build_wheel, interpreter

FOLDER = ROOT / "build" / "pythons"
VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t")  # t: without the interpreter's lock
SOURCES = (
    "call_one", "call on 4", "call on 8", "pipelined", "1 MB argument", "64 MB argument", "64 MB bytes",
    "64 MB broadcast", "8 procs to first reply", "import to first reply, cold", "spawn to first reply, cold",
    "death told",
)  # fmt: skip
PLAN = Plan(calls=2000, casts=600, megabyte=200, spawns=3, kills=6, colds=5, idle_s=5.0, actors=200, heavy="numpy")
ROUNDS = 2


def prepared(version: str, python: Path, wheel: Path) -> Path:
    """The Python of an environment that has this wheel and what it needs, and NumPy."""
    own = FOLDER / version / "bin" / "python"
    if not own.exists():
        print(f"making {own.parents[1]} with {python}", file=sys.stderr, flush=True)
        subprocess.run([python, "-m", "venv", own.parents[1]], check=True)
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    subprocess.run([*pip, wheel, "numpy"], check=True)
    return own


def better(row: Row, figures: list[Figures]) -> float | None:
    """The best of a row in these rounds."""
    values = [value for entry in figures if (value := row.of(entry)) is not None]
    return None if not values else max(values) if row.more_is_better else min(values)


def main(versions: list[str]) -> int:
    """Prints the table; 1 if no Python could be measured."""
    pythons: dict[str, Path] = {}
    wheel = build_wheel()
    for version in versions or VERSIONS:
        python = interpreter(version)
        if python is None:
            name = "PYTHON_" + version.replace(".", "_")
            print(f"NOT MEASURED HERE: there is no Python {version}; name one by {name}=", file=sys.stderr)
            continue
        pythons[version] = prepared(version, python, wheel)
    before = load()
    measured: dict[str, list[Figures]] = {version: [] for version in pythons}
    for _ in range(ROUNDS):
        for version, own in pythons.items():
            print(f"measuring Python {version} ...", file=sys.stderr, flush=True)
            figures, wrong = run("program_actors.py", str(own), PLAN, ours=True)
            measured[version].append(figures)
            if wrong and not figures:
                print(wrong, file=sys.stderr)
    print(f"{processor()}; load {before:.1f} before, {load():.1f} after; the better of {ROUNDS} rounds, in turns")
    print(f"| | unit | {' | '.join(measured)} |")
    print(f"|---|---|{'---:|' * len(measured)}")
    for row in ROWS:
        if row.source in SOURCES:
            values = [number(better(row, rounds)) for rounds in measured.values()]
            print(f"| {row.title} | {row.unit} | {' | '.join(values)} |")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "figures.json").write_text(json.dumps(measured, indent=1))
    return int(not measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
