"""docs/diagnosis.md, from the outcomes of planted faults."""

import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.planted_faults.cases import FAULTY, HEALTHY
from tests.planted_faults.runner import GRADES, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"

HEAD = """# Planted faults

{faulty} faults were planted in programs that run on 2 to 8 real processes of one machine, and {healthy} programs were
run that are healthy but look suspicious, each {seeds} with other ranks and steps: DDP, FSDP, collectives by hand in one
or several groups, sharded tensors, actors that call each other. Each time `monarch.diagnose()`, or the watch that is
made for the fault, was asked which rank is to blame, and its answer was compared with what was planted.

An answer is *right* if it names the kind and exactly the ranks, for sure; where the evidence always allows another
explanation (`waiting_on`, replicas without DDP), as a suspicion. It is *wrong* if anything else is said for sure, in
any of the looks. Healthy programs run for a thousand steps and more, and are asked about all the time. Their ranks do
make each other wait, where one saves or evaluates alone: looks that say no more than that, about the rank which does so
(`waiting_on`), are counted by themselves; every other finding that is not sure is a suspicion. Beside that, each was
watched as the cell that runs it watches it: which shows something after ten seconds without progress.

**{right} of {planted} answers about planted faults are right ({percent:.1f} %), {wrong} wrong. {accused} of {runs} runs
of healthy programs has a finding that is sure; {suspected} of their {looks:,} looks have a suspicion
({unsure:.2f} %)**. {waiting} say that the others wait for a rank, which they did. Cells would have shown something in
{shown} of the runs: {shown_cases}.

Measured on {date}: {machine}, PyTorch {torch}, {load}.
"""

MATRIX = """
## Planted and found

Rows are what was planted, columns the kind of the finding that counts; "none" is silence.

"""

GRADED = """
## How sure, and how fast

*Verdict* is the time from the fault, when the last planted rank is at its place, to the right answer: nothing is
said about a rank before others have waited for it for three seconds. *Call* is the time that the `diagnose()` took
which gave it. Both are the median and the longest.

"""

NOT_RIGHT = """
## Answers that are not right

| case | seeds | answer, of one of them |
|---|---|---|
"""

END = """
## Cases

{cases}

`make planted-faults` runs all of them and writes this page; `python -m tests.planted_faults --only 'DDP stuck'` runs
some. `make test` runs a few, and `make test-slow` one of each kind.
"""


def page(outcomes: Sequence[Outcome], load: str, before: str = "") -> str:
    """The text of the page; its costs, which `benchmarks.diagnosis` writes, are taken from the page `before`."""
    import torch

    planted = [run for run in outcomes if run.planted != "healthy"]
    healthy = [run for run in outcomes if run.planted == "healthy"]
    right = sum(run.grade == "right" for run in planted)
    seeds = len({run.seed for run in outcomes})
    text = HEAD.format(
        faulty=len({run.name for run in planted}),
        healthy=len({run.name for run in healthy}),
        seeds={1: "once", 2: "twice", 3: "three times"}.get(seeds, f"{seeds} times"),
        right=right,
        planted=len(planted),
        percent=100 * right / max(1, len(planted)),
        wrong=sum(run.grade == "wrong" for run in planted) or "none",
        accused=sum(run.grade == "wrong" for run in healthy) or "Not one",
        runs=len(healthy),
        suspected=f"{sum(run.unsure for run in healthy):,}",
        looks=sum(run.looks for run in healthy),
        unsure=100 * sum(run.unsure for run in healthy) / max(1, sum(run.looks for run in healthy)),
        waiting=f"{sum(run.waiting for run in healthy):,}",
        shown=sum(run.shown > 0 for run in healthy) or "none",
        shown_cases=", ".join(sorted({run.name for run in healthy if run.shown})) or "none waits for so long",
        date=time.strftime("%-d %B %Y"),
        machine=f"{os.cpu_count()} cores, Linux on {platform.machine()}, Python {platform.python_version()}",
        torch=torch.__version__.partition("+")[0],
        load=load,
    )
    text += MATRIX + _matrix(outcomes) + GRADED + _graded(planted) + _not_right(outcomes)
    costs = re.search(r"\n## What it costs\n.*?(?=\n## )", before, re.DOTALL)
    return text + (costs[0] if costs else "") + END.format(cases=_cases())


def _matrix(outcomes: Sequence[Outcome]) -> str:
    rows = list(dict.fromkeys(run.planted for run in sorted(outcomes, key=lambda run: run.planted == "healthy")))
    columns = [*(row for row in rows if row != "healthy"), ""]
    columns[-1:-1] = sorted({run.answer for run in outcomes} - set(columns))
    text = f"| planted | {' | '.join(column or 'none' for column in columns)} |\n|---|{'---|' * len(columns)}\n"
    for row in rows:
        counts = [sum(run.planted == row and run.answer == column for run in outcomes) for column in columns]
        cells = (
            f"**{count}**" if row == column and count else str(count or "")
            for count, column in zip(counts, columns, strict=True)
        )
        text += f"| {row} | {' | '.join(cells)} |\n"
    return text


def _graded(planted: Sequence[Outcome]) -> str:
    text = f"| planted | {' | '.join(GRADES)} | verdict | call |\n|---|{'---|' * (len(GRADES) + 2)}\n"
    for kind in dict.fromkeys(run.planted for run in planted):
        runs = [run for run in planted if run.planted == kind]
        counts = (str(sum(run.grade == grade for run in runs) or "") for grade in GRADES)
        times = [_seconds([run.seconds for run in runs]), _seconds([run.asked for run in runs])]
        text += f"| {kind} | {' | '.join([*counts, *times])} |\n"
    return text


def _seconds(seconds: Sequence[float]) -> str:
    times = [value for value in seconds if value]
    return f"{median(times):.1f} s, {max(times):.1f} s" if times else ""


def _not_right(outcomes: Sequence[Outcome]) -> str:
    alike: dict[tuple[int, str, str], list[Outcome]] = {}
    for run in outcomes:
        if run.grade != "right":
            alike.setdefault((-GRADES.index(run.grade), run.planted, run.name), []).append(run)
    rows = (
        f"| {planted}: {name} | {', '.join(str(run.seed) for run in sorted(runs, key=lambda run: run.seed))} "
        f"| {runs[0].grade}: {runs[0].text.replace('|', '/') or 'silence'} |\n"
        for (_, planted, name), runs in sorted(alike.items())
    )
    return NOT_RIGHT + "".join(rows) if alike else ""


def _cases() -> str:
    kinds: dict[str, list[str]] = {}
    for case in (*FAULTY, *HEALTHY):
        kinds.setdefault(case.kind or "healthy", []).append(case.name)
    return "\n".join(f"- {kind}: {'; '.join(names)}" for kind, names in kinds.items())


def read(text: str) -> dict[str, list[str]]:
    """The content of a page: by kind, the cases."""
    rows = re.findall(r"^- (\w+): (.+)$", text, re.MULTILINE)
    return {kind: names.split("; ") for kind, names in rows}
