"""The report: `python -m tests.gpu [--part tensors ...] [--page docs/gpu.md]`. Ends with 1 if a fact failed."""

import argparse
import concurrent.futures
import datetime
import importlib
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import DEVICE, LIMIT_S, NotTried, has_gpu

PARTS = {
    "driver": "What the driver of pretence assumes",
    "devices": "Devices of processes",
    "values": "Arguments and results",
    "rdma": "RDMABuffer",
    "tensors": "Sharded tensors",
    "modules": "Modules on meshes",
    "ranks": "Tensors of the ranks' own values",
    "memory": "Memory, and sharing a GPU",
    "training": "Training",
    "debugging": "Debugger and errors",
    "frameworks": "Frameworks",
}
_OUTCOME = "fact: "  # begins the line with the outcome
_WORDS = {"holds": "✓", "fails": "✗ **fails**", "not tried": "– not tried"}
_ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """The outcome of one fact."""

    part: str
    name: str
    title: str
    how: str  # "holds", "fails" or "not tried"
    evidence: str
    seconds: float


def facts(part: str) -> dict[str, Callable[[], str]]:
    """The facts of a part, in the order in which they are written."""
    module = importlib.import_module(f"tests.gpu.{part}")
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(value).parameters
    }


def title(function: Callable[[], str]) -> str:
    """The first line of its docstring."""
    return inspect.getdoc(function).splitlines()[0].rstrip(".")  # type: ignore[union-attr]


def run_here(part: str, name: str) -> None:
    """Runs one fact in this process, and prints its outcome."""
    began = time.perf_counter()
    try:
        how, evidence = "holds", facts(part)[name]()
    except NotTried as error:
        how, evidence = "not tried", str(error)
    except BaseException as error:
        traceback.print_exc()
        how, evidence = "fails", f"{type(error).__name__}: {error}"
    print(f"\n{_OUTCOME}{json.dumps([how, evidence, time.perf_counter() - began])}", flush=True)


def run_apart(part: str, name: str, logs: Path) -> Outcome:
    """Runs one fact in a process of its own, and ends what it leaves running."""
    function = facts(part)[name]
    limit = float(getattr(function, "limit_s", LIMIT_S))
    log = logs / f"{part}.{name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--fact", f"{part}.{name}"],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=_ROOT, start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGABRT)  # with stacks, by faulthandler
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    answers = [line for line in lines if line.startswith(_OUTCOME)]
    seconds = time.monotonic() - began
    if answers and not late:
        how, evidence, seconds = json.loads(answers[-1].removeprefix(_OUTCOME))
    else:
        reason = f"no end within {limit:.0f} s" if late else f"its process ended with {process.returncode}"
        how, evidence = "fails", f"{reason}: {' / '.join(lines[-3:])[-300:]}"
    return Outcome(part, name, title(function), how, evidence, seconds)


def run_all(chosen: Iterable[tuple[str, str]], jobs: int, logs: Path) -> Iterator[Outcome]:
    """Outcomes as they come: first of the facts that run side by side, then of those that measure."""
    beside, alone = [], []
    for part, name in chosen:
        (alone if getattr(facts(part)[name], "alone", False) else beside).append((part, name))
    beside.sort(key=lambda item: -getattr(facts(item[0])[item[1]], "limit_s", LIMIT_S))  # the longest first
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_apart, part, name, logs) for part, name in beside]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    for part, name in alone:
        yield run_apart(part, name, logs)


def about() -> str:
    """Date, GPU, driver and versions."""
    import torch

    query = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ) if _has("nvidia-smi") else None  # fmt: skip
    gpus = "; ".join(query.stdout.strip().splitlines()) if query and query.stdout.strip() else "no GPU"
    return (
        f"{datetime.date.today():%Y-%m-%d}, {gpus}; PyTorch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors"
    )


def _has(program: str) -> bool:
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.environ.get("PATH", "").split(":"))


def page(outcomes: list[Outcome]) -> str:
    """The report, as Markdown."""
    counts = {how: sum(outcome.how == how for outcome in outcomes) for how in _WORDS}
    lines = [
        "# What was seen on a GPU",
        "",
        "Made by `make gpu-report`: each line is a small program that ran on the machine named here. What has no line",
        "here was not seen on a GPU.",
        "",
        f"**{about()}**: {counts['holds']} facts hold, {counts['fails']} fail, {counts['not tried']} were not tried.",
    ]
    for part, heading in PARTS.items():
        rows = [outcome for outcome in outcomes if outcome.part == part]
        if not rows:
            continue
        lines += ["", f"## {heading}", "", "| fact | | evidence | s |", "|---|---|---|---:|"]
        for outcome in rows:
            evidence = outcome.evidence.replace("|", "\\|").replace("\n", " ")[:400]
            lines.append(f"| {outcome.title} | {_WORDS[outcome.how]} | {evidence} | {outcome.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART.NAME", help="these facts alone")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART.NAME", help="all but these facts")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 4), help="facts side by side")
    parser.add_argument("--page", type=Path, help="where the page goes; it is printed anyhow")
    parser.add_argument("--logs", type=Path, default=_ROOT / "build/gpu-report", help="what the facts print goes here")
    parser.add_argument("--fact", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fact:
        import faulthandler

        faulthandler.enable()
        run_here(*args.fact.split("."))
        sys.stdout.flush()
        return 0
    if DEVICE == "cuda" and not has_gpu():
        print(
            f"There is no GPU here: torch.cuda.is_available() says so ({about()}). Facts that need one are not tried."
        )
        if args.page:
            print(
                f"{args.page} keeps what was seen on a GPU, and is not written. PART=devices runs a part all the same."
            )
            return 1
    chosen = [(part, name) for part in args.part for name in facts(part)]
    if args.only:
        chosen = [item for item in chosen if ".".join(item) in args.only]
    chosen = [item for item in chosen if ".".join(item) not in args.skip]
    args.logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    order = {item: number for number, item in enumerate(chosen)}
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for outcome in run_all(chosen, args.jobs, args.logs):
            outcomes.append(outcome)
            line = f"{outcome.how:9}  {outcome.part}.{outcome.name}: {outcome.evidence}"
            print(f"{time.monotonic() - began:5.0f} s  {line}"[:600], flush=True)
    except KeyboardInterrupt:
        done = {(outcome.part, outcome.name) for outcome in outcomes}
        outcomes += [
            Outcome(part, name, title(facts(part)[name]), "not tried", "the run was ended before its turn", 0.0)
            for part, name in chosen
            if (part, name) not in done
        ]
    outcomes.sort(key=lambda outcome: order[outcome.part, outcome.name])
    text = page(outcomes)
    if args.page:
        args.page.write_text(text)
    print("\n" + text)
    return int(any(outcome.how == "fails" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
