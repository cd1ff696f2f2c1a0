"""`make chaos`: a working job on three hosts with addresses of their own, and faults without end.

Faults are drawn from a seed, which is printed. Ends with status 1 if a call did not end within its bound, or with an
error that has no public name or tells neither mesh nor rank nor host; if something took effect twice, or not although
it was answered; if a mesh was not brought back; or if anything is left at the end.
"""

import argparse
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from scripts.processes import MARK, left_behind
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.ledger import Verdict, judge
from tests.chaos.network import objection
from tests.chaos.program import BOUND, SLOTS
from tests.chaos.team import Team

HOSTS = 3
HEAL = 90.0  # seconds within which a mesh whose faults are mended has to answer again
TOGETHER = 3  # faults at a time, at most


class Run:
    """Rounds of faults, until there were enough."""

    def __init__(self, team: Team, seed: int, only: str) -> None:
        self.team = team
        self.kinds = [fault for fault in FAULTS if only in fault.kind]
        self.dice = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.told: Counter[str] = Counter()

    def go(self, count: int, until: float) -> None:
        """So many faults, or as many as there is time for."""
        self.recover([])
        while self.faults.total() < count and time.monotonic() < until:
            self.round(count - self.faults.total())

    def round(self, most: int) -> None:
        """A few faults at a time, each mended after a while; then all has to work again."""
        weights = [fault.weight for fault in self.kinds]
        drawn: dict[tuple[str, int], Fault] = {}
        for fault in self.dice.choices(self.kinds, weights, k=self.dice.randint(1, TOGETHER)):
            place = self.dice.randrange({"rank": HOSTS * SLOTS, "host": HOSTS, "controller": 1}[fault.target])
            drawn.setdefault((fault.target, place), fault)
        struck = []
        now = time.monotonic()
        for (target, place), fault in list(drawn.items())[:most]:
            time.sleep(self.dice.random() * 0.1)
            self._note(f"{fault.kind}: {target} {place}")
            undo = fault.strike(self.team, place, self.dice)
            self.faults[fault.kind] += 1
            struck.append((now + self.dice.uniform(*fault.lasts), fault.target, fault.kind, undo))
        # A controller comes last: it finds its hosts as they are by then.
        for due, _, kind, undo in sorted(struck, key=lambda each: (each[1] == "controller", each[0])):
            time.sleep(max(0.0, due - time.monotonic()))
            self._note(f"over: {kind}")
            undo()
        self.recover([kind for _, _, kind, _ in struck])

    def recover(self, kinds: list[str]) -> None:
        """Heal, and note how long that took."""
        began = time.monotonic()
        self._note("heal")
        try:
            answer = self.team.ask(HEAL + 60, do="heal", seconds=HEAL)
        except (TimeoutError, EOFError) as error:
            self.wrong.append(f"after {kinds}: {error}")
            raise
        for text in answer["told"]:
            self.told[text.partition(":")[0]] += 1
        if "failed" in answer:
            self.wrong.append(f"not healed after {kinds}: {answer['told']}")
            raise TimeoutError(self.wrong[-1])
        self.team.pids = answer["pids"]
        seconds = time.monotonic() - began
        self._note(f"healed after {seconds:.2f} s: {answer['told']}")
        for kind in kinds:
            self.recoveries[kind].append(seconds)

    def _note(self, what: str) -> None:
        with open(self.team.folder / "faults.log", "a") as log:
            log.write(f"{time.time():.3f} {what}\n")


def table(run: Run, verdict: Verdict) -> str:
    """Faults by kind and how long it took until all answered again; calls, and what became of them."""
    lines = [f"{'fault':38} {'count':>6} {'p50 s':>8} {'p99 s':>8} {'most s':>8}"]
    for fault in FAULTS:
        count = run.faults[fault.kind]
        times = sorted(run.recoveries[fault.kind])
        lines.append(f"{fault.kind:38} {count:6} {_spread(times)}")
    every = sorted(second for seconds in run.recoveries.values() for second in seconds)
    lines.append(f"{'all':38} {run.faults.total():6} {_spread(every)}")
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(verdict.calls.items()))
    errors = ", ".join(f"{name} {count}" for name, count in verdict.errors.most_common())
    lines += [
        f"calls: {verdict.calls.total()} ({kinds})",
        f"results: {verdict.results}; errors: {verdict.errors.total()} ({errors or 'none'}); "
        f"cut off with their controller: {verdict.cut_off}",
        f"effects: {verdict.effects}; slowest call: {verdict.slowest:.1f} s (bound {BOUND:g} s)",
        f"controllers: {Counter(how.partition(',')[0] for how in run.team.stories)}; "
        f"heals that had to wait: {dict(run.told)}",
        *(f"  {how}" for how in run.team.stories if "," in how),
    ]
    return "\n".join(lines)


def _spread(times: list[float]) -> str:
    if not times:
        return f"{'':8} {'':8} {'':8}"
    return " ".join(f"{times[min(len(times) - 1, int(part * len(times)))]:8.2f}" for part in (0.5, 0.99, 1.0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=86400.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--only", default="", help="no faults but those with this in their names")
    parser.add_argument("--keep", action="store_true", help="leave the folder with ledgers and logs")
    options = parser.parse_args()
    why_not = objection()
    if why_not:
        print(f"NOT TESTED HERE: {why_not}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mchaos-", dir="/tmp"))
    mark = secrets.token_hex(8)
    runs = folder / "r"
    runs.mkdir(mode=0o700)
    env = {MARK: mark, "XDG_RUNTIME_DIR": str(runs), "XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder)}
    memory = _memory_files()
    print(f"seed {options.seed}, folder {folder}", flush=True)
    began = time.monotonic()
    wrong: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left then, either
    team = Team(folder, HOSTS, env)
    run = Run(team, options.seed, options.only)
    try:
        run.go(options.faults, began + options.seconds)
        team.end()
    except (TimeoutError, EOFError, AssertionError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        team.close()
    wrong += run.wrong
    wrong += [f"left: process {line}" for line in left_behind(mark)]
    wrong += [f"left: /dev/shm/{name}" for name in _memory_files() - memory]
    wrong += [f"left: {path}" for path in _left_folders(runs)]
    verdict = judge(folder, team.killed, BOUND, team.names)
    wrong += verdict.wrong
    print(f"{time.monotonic() - began:.0f} s, seed {options.seed}")
    print(table(run, verdict))
    for line in wrong:
        print(f"WRONG {line}")
    if not (options.keep or wrong):
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


def _memory_files() -> set[str]:
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def _left_folders(runs: Path) -> list[str]:
    """Run folders: those of agents and controllers that were killed are swept by whoever comes next, as here."""
    from monarch_nb.host import folders

    time.sleep(1.1)  # younger ones may be somebody's who has just come
    folders.sweep(runs)
    return [path.name for path in runs.iterdir()]


if __name__ == "__main__":
    sys.exit(main())
