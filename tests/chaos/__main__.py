"""`make chaos`: a working job on three hosts with addresses of their own, and faults without end.

Faults are drawn from a seed, which is printed. Ends with status 1 if a call did not end within its bound, or with an
error that has no public name or tells neither mesh nor rank nor host; if something took effect twice, or not although
it was answered; if a mesh was not brought back; if a process of a job ended that no fault had struck; or if anything is
left at the end.
"""

import argparse
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Set
from pathlib import Path

from scripts.processes import MARK, left_behind
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.ledger import Verdict, judge
from tests.chaos.network import objection
from tests.chaos.program import BOUND, HOSTS, SLOTS
from tests.chaos.sites import SITES, site
from tests.chaos.team import Team

HEAL = 90.0  # seconds within which a mesh whose faults are mended has to answer again
JOB = {"CHAOS_BOUND": "120", "CHAOS_HEAL": "60"}  # seconds: a job's hosts have a lease of 60 s
TOGETHER = 3  # faults at a time, at most


class Run:
    """Rounds of faults, until there were enough."""

    def __init__(self, team: Team, seed: int, only: str, over: str) -> None:
        self.team, self.over = team, over
        self.kinds = [fault for fault in FAULTS if only in fault.kind and over in fault.sites]
        self.dice = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.obstacles: Counter[str] = Counter()

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
            index = self.dice.randrange({"rank": HOSTS * SLOTS, "host": HOSTS, "controller": 1}[fault.target])
            drawn.setdefault((fault.target, index), fault)
        struck: list[tuple[float, str, str, Callable[[], None]]] = []
        may_end: set[int] = set()
        now = time.monotonic()
        for (target, index), fault in list(drawn.items())[:most]:
            time.sleep(self.dice.random() * 0.1)
            self._note(f"{fault.kind}: {target} {index}")
            undo = fault.strike(self.team, index, self.dice)
            self.faults[fault.kind] += 1
            struck.append((now + fault.seconds(self.dice), fault.target, fault.kind, undo))
            may_end |= {
                "": set(), "rank": {index}, "host": set(range(index * SLOTS, (index + 1) * SLOTS)),
                "all": set(range(HOSTS * SLOTS)),
            }[fault.ends]  # fmt: skip
        # A controller comes last: it finds its hosts as they are by then.
        for due, _, kind, undo in sorted(struck, key=lambda entry: (entry[1] == "controller", entry[0])):
            time.sleep(max(0.0, due - time.monotonic()))
            self._note(f"over: {kind}")
            undo()
        self.recover([kind for _, _, kind, _ in struck], may_end)

    def recover(self, kinds: list[str], may_end: Set[int] = frozenset()) -> None:
        """Heal, and note how long that took. Of a job no other ranks than `may_end` have other processes then."""
        began = time.monotonic()
        self._note("heal")
        try:
            answer = self.team.ask(HEAL + 60, do="heal", seconds=HEAL)
        except (TimeoutError, EOFError) as error:
            self.wrong.append(f"after {kinds}: {error}")
            raise
        for text in answer["told"]:
            self.obstacles[text.partition(":")[0]] += 1
        if "failed" in answer:
            self.wrong.append(f"not healed after {kinds}: {answer['told']}")
            raise TimeoutError(self.wrong[-1])
        wrong_ranks = [
            rank
            for rank, (before, after) in enumerate(zip(self.team.pids, answer["pids"], strict=False))
            if before != after and rank not in may_end
        ]
        if wrong_ranks and self.over != "agents":
            self.wrong.append(f"ranks {wrong_ranks} have other processes after {kinds}: {answer['told']}")
            self._note(self.wrong[-1])
        self.team.pids = answer["pids"]
        seconds = time.monotonic() - began
        self._note(f"healed after {seconds:.2f} s: {answer['told']}")
        for kind in kinds:
            self.recoveries[kind].append(seconds)

    def _note(self, text: str) -> None:
        with open(self.team.folder / "faults.log", "a") as log:
            log.write(f"{time.time():.3f} {text}\n")


def table(run: Run, verdict: Verdict) -> str:
    """Faults by kind and how long it took until all answered again; calls, and their outcomes."""
    lines = [f"{'fault':38} {'count':>6} {'p50 s':>8} {'p99 s':>8} {'most s':>8}"]
    for fault in run.kinds:
        count = run.faults[fault.kind]
        times = sorted(run.recoveries[fault.kind])
        lines.append(f"{fault.kind:38} {count:6} {_spread(times)}")
    seconds_of_all = sorted(second for seconds in run.recoveries.values() for second in seconds)
    lines.append(f"{'all':38} {run.faults.total():6} {_spread(seconds_of_all)}")
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(verdict.calls.items()))
    errors = ", ".join(f"{name} {count}" for name, count in verdict.errors.most_common())
    lines += [
        f"calls: {verdict.calls.total()} ({kinds})",
        f"results: {verdict.results}; errors: {verdict.errors.total()} ({errors or 'none'}); "
        f"cut off with their controller: {verdict.cut_off}",
        f"effects: {verdict.effects}; slowest call: {verdict.slowest:.1f} s",
        f"controllers: {Counter(how.partition(',')[0] for how in run.team.arrivals)}; "
        f"heals that had to wait: {dict(run.obstacles)}",
        *(f"  {how}" for how in run.team.arrivals if "," in how),
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
    parser.add_argument("--over", choices=SITES, default="agents", help="where the hosts come from (default: agents)")
    parser.add_argument("--only", default="", help="no faults but those with this in their names")
    parser.add_argument("--keep", action="store_true", help="leave the folder with ledgers and logs")
    options = parser.parse_args()
    why_not = objection()
    if why_not:
        print(f"NOT TESTED HERE: {why_not}")
        return 0
    if options.over != "agents":
        os.environ.update({name: os.environ.get(name, seconds) for name, seconds in JOB.items()})
    bound = float(os.environ.get("CHAOS_BOUND", BOUND))
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
    team = Team(folder, site(options.over, folder, HOSTS, env))
    run = Run(team, options.seed, options.only, options.over)
    try:
        run.go(options.faults, began + options.seconds)
        team.end()
    except (TimeoutError, EOFError, AssertionError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        team.close()
    wrong += run.wrong + team.lost
    wrong += [f"left: process {line}" for line in left_behind(mark)]
    wrong += [f"left: /dev/shm/{name}" for name in _memory_files() - memory]
    wrong += [f"left: {path}" for path in _left_folders(runs)]
    wrong += [f"left: {path}" for path in folder.glob("state/monarch-nb/jobs/*/*")]
    verdict = judge(folder, team.killed, bound, team.names)
    wrong += verdict.wrong
    print(f"{time.monotonic() - began:.0f} s over {options.over}, seed {options.seed}, bound of a call {bound:g} s")
    print(table(run, verdict))
    for line in wrong:
        print(f"WRONG {line}")
    if not (options.keep or wrong):
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


def _memory_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _left_folders(runs: Path) -> list[str]:
    """Run folders: those of agents and controllers that were killed are swept by the next one, as here."""
    from monarch_nb.host import folders

    time.sleep(1.1)  # younger ones may be somebody's who has just come
    folders.sweep(runs)
    return [path.name for path in runs.iterdir()]


if __name__ == "__main__":
    sys.exit(main())
