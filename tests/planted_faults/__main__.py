"""Plants faults in programs on real processes, asks who is to blame, and counts right and wrong answers.

`python -m tests.planted_faults --page docs/diagnosis.md` runs all cases three times, and writes the page.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, cast

from monarch_nb.lifecycle import unhandled
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import counted
from tests.planted_faults.cases import FAULTY, HEALTHY, Case
from tests.planted_faults.page import page
from tests.planted_faults.runner import Outcome, run

CASES = {case.name: case for case in (*FAULTY, *HEALTHY)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="names of cases, or words that they have: 'DDP dead'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="cases at a time")
    parser.add_argument("--page", type=Path, default=None, help="the page to write, from these outcomes")
    parser.add_argument(
        "--results", type=Path, default=None, help="a file to which outcomes are added, and known ones are read from"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--work", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    cases = [case for case in CASES.values() if any(_has(case, words) for words in options.only)]
    if options.list:
        print("\n".join(f"{case.kind or 'healthy':<24} {case.name}" for case in cases))
        return 0
    known = list(_known(options.results))
    done = {(outcome.name, outcome.seed) for outcome in known}
    left = [(case.name, seed) for seed in options.seeds for case in cases if (case.name, seed) not in done]
    outcomes = [outcome for outcome in known if outcome.name in {case.name for case in cases}]
    for number, outcome in enumerate(_run(left[::-1], options.jobs), 1):
        outcomes.append(outcome)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        print(f"{number:>4}/{len(left)} {outcome.grade:<8} {outcome.planted:<22} {outcome.name}, seed {outcome.seed}: "
              f"{outcome.text or '-'} ({outcome.seconds:.1f} s, {outcome.looks} looks)", flush=True)  # fmt: skip
    print(Counter(("healthy" if each.planted == "healthy" else "planted", each.grade) for each in outcomes))
    if options.page is not None:
        options.page.write_text(page(outcomes, f"{counted(options.jobs, 'case')} at a time"))
    return any(outcome.grade in ("wrong", "not run") for outcome in outcomes)


def _has(case: Case, words: str) -> bool:
    if words in CASES:
        return words == case.name
    return all(word in f"{case.kind or 'healthy'} {case.name}" for word in words.split())


def _known(results: Path | None) -> Iterator[Outcome]:
    if results is not None and results.exists():
        yield from (Outcome(**json.loads(line)) for line in results.read_text().splitlines())


def _run(left: list[tuple[str, int]], jobs: int) -> Iterator[Outcome]:
    """In processes with a controller each. One that ends while it runs a case is replaced."""
    given: dict[int, tuple[str, int]] = {}  # by process
    with selectors.DefaultSelector() as selector:
        for _ in range(min(jobs, len(left))):
            _start(selector, given, left)
        while selector.get_map():
            for key, _ in selector.select():
                answers, process = cast("TextIO", key.fileobj), cast("subprocess.Popen[str]", key.data)
                line, case = answers.readline(), given.pop(process.pid, None)
                if line:
                    yield Outcome(**json.loads(line))
                    _feed(process, given, left)
                    continue
                selector.unregister(answers)
                answers.close()
                status = process.wait()
                if case is not None:
                    name, seed = case
                    kind = CASES[name].kind or "healthy"
                    yield Outcome(name, seed, kind, "", "not run", text=f"its controller ended with status {status}")
                    _start(selector, given, left)


def _start(selector: selectors.BaseSelector, given: dict[int, tuple[str, int]], left: list[tuple[str, int]]) -> None:
    reads, writes = os.pipe()
    line = [sys.executable, "-m", "tests.planted_faults", "--work", str(writes)]
    output = None if os.environ.get("PLANTED_OUTPUT") else subprocess.DEVNULL
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[writes], text=True)
    os.close(writes)
    selector.register(os.fdopen(reads), selectors.EVENT_READ, process)
    _feed(process, given, left)


def _feed(process: "subprocess.Popen[str]", given: dict[int, tuple[str, int]], left: list[tuple[str, int]]) -> None:
    assert process.stdin is not None
    if left:
        given[process.pid] = left.pop()
        process.stdin.write(json.dumps(given[process.pid]) + "\n")
        process.stdin.flush()
    else:
        process.stdin.close()


def work(report: int) -> None:
    """Runs the cases that are read, one a line."""
    current_runtime()
    unhandled.notebook_mode(lambda failure: None)
    with os.fdopen(report, "w", buffering=1) as out:
        for line in sys.stdin:
            name, seed = json.loads(line)
            try:
                outcome = run(CASES[name], seed)
            except Exception as error:
                kind = CASES[name].kind or "healthy"
                outcome = Outcome(name, seed, kind, "", "not run", text=f"{type(error).__name__}: {error}"[:400])
            out.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
