"""Plants faults in programs on real processes, asks which rank is to blame, and counts right and wrong answers.

`python -m tests.planted_faults --page docs/diagnosis.md` runs all cases three times, and writes the page.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, cast

from monarch_nb.lifecycle import unhandled
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
    stored = list(_stored(options.results))
    done = {(outcome.name, outcome.seed) for outcome in stored}
    pending = [(case.name, seed) for seed in options.seeds for case in cases if (case.name, seed) not in done]
    outcomes = [outcome for outcome in stored if outcome.name in {case.name for case in cases}]
    with tempfile.TemporaryDirectory() as folder:
        for number, outcome in enumerate(_Controllers(pending, Path(folder)).run(options.jobs), 1):
            outcomes.append(outcome)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            print(
                f"{number:>4}/{len(pending)} {outcome.grade:<8} {outcome.planted:<22} {outcome.name}, "
                f"seed {outcome.seed}: {outcome.text or '-'} ({outcome.seconds:.1f} s, {outcome.looks} looks)",
                flush=True,
            )
    print(Counter(("healthy" if outcome.planted == "healthy" else "planted", outcome.grade) for outcome in outcomes))
    if options.page is not None:
        before = options.page.read_text() if options.page.exists() else ""
        options.page.write_text(page(outcomes, f"{counted(options.jobs, 'case')} at a time", before))
    return any(outcome.grade in ("wrong", "not run") for outcome in outcomes)


def _has(case: Case, words: str) -> bool:
    if words in CASES:
        return words == case.name
    return all(word in f"{case.kind or 'healthy'} {case.name}" for word in words.split())


def _stored(results: Path | None) -> Iterator[Outcome]:
    if results is not None and results.exists():
        yield from (Outcome(**json.loads(line)) for line in results.read_text().splitlines())


class _Controllers:
    """Processes with a controller each, which run cases. One that ends while it runs a case is replaced."""

    def __init__(self, pending: list[tuple[str, int]], folder: Path) -> None:
        self._pending, self._folder = pending[::-1], folder
        self._running: dict[int, tuple[str, int]] = {}  # by process
        self._selector = selectors.DefaultSelector()

    def run(self, jobs: int) -> Iterator[Outcome]:
        for _ in range(min(jobs, len(self._pending))):
            self._start()
        while self._selector.get_map():
            for key, _ in self._selector.select():
                answers, process = cast("TextIO", key.fileobj), cast("subprocess.Popen[str]", key.data)
                line, case = answers.readline(), self._running.pop(process.pid, None)
                if line:
                    yield Outcome(**json.loads(line))
                    self._feed(process)
                    continue
                self._selector.unregister(answers)
                answers.close()
                status = process.wait()
                if case is not None:
                    yield _not_run(*case, f"its controller ended with status {status}: {self._last_words(process)}")
                    self._start()

    def _start(self) -> None:
        reads, writes = os.pipe()
        line = [sys.executable, "-m", "tests.planted_faults", "--work", str(writes)]
        with (self._folder / "new").open("w") as output:
            process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[writes], text=True
            )
        (self._folder / "new").rename(self._folder / str(process.pid))
        os.close(writes)
        self._selector.register(os.fdopen(reads), selectors.EVENT_READ, process)
        self._feed(process)

    def _feed(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        if self._pending:
            self._running[process.pid] = self._pending.pop()
            process.stdin.write(json.dumps(self._running[process.pid]) + "\n")
            process.stdin.flush()
        else:
            process.stdin.close()

    def _last_words(self, process: "subprocess.Popen[str]") -> str:
        return (self._folder / str(process.pid)).read_text(errors="replace")[-400:].replace("\n", " ")


def _not_run(name: str, seed: int, reason: str) -> Outcome:
    return Outcome(name, seed, CASES[name].kind or "healthy", "", "not run", text=reason)


def work(report: int) -> None:
    """Runs the cases that are read, one a line."""
    with os.fdopen(report, "w", buffering=1) as out:
        for line in sys.stdin:
            name, seed = json.loads(line)
            unhandled.notebook_mode(lambda failure: None)  # of this runtime: one case takes it down
            try:
                outcome = run(CASES[name], seed)
            except Exception as error:
                outcome = _not_run(name, seed, f"{type(error).__name__}: {error}"[:400])
            out.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
