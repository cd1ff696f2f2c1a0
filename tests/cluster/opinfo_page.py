"""docs/tensor-coverage.md, from the outcomes of all samples.

`python -m tests.cluster.opinfo_page RESULTS` writes it, from what `python -m tests.cluster.opinfo_mesh RESULTS` found.
"""

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import opinfo_cases as cases

PAGE = Path(__file__).parents[2] / "docs" / "tensor-coverage.md"
LONGEST = 180  # of an error, in the table
UNTRIED = ("no sample", "no local result")

HEAD = """# Which operations run on sharded tensors

PyTorch ships samples for {count} operations, with which it tests itself. Here one of each, of the most dimensions, runs
on a mesh of two processes, forward and backward, and values and gradients are compared with those of local tensors.
Inputs are whole on each process, cut by rows, cut by columns, or parts of a sum; their sizes divide by the number of
processes (even), or do not (uneven); a few operations have samples of sizes of their own only. Of those that draw
random numbers, shapes and types are compared, since a mesh draws others than one process.

**{right} are right in all cases, none of these samples is wrong.** {refused} are refused in some case or in
all, with an error that says why, and {untried} cannot be tried: their samples do not run on local tensors, or
there are none in this build of PyTorch.

This page is written by `python -m tests.cluster.opinfo_page RESULTS`, from what
`python -m tests.cluster.opinfo_mesh RESULTS` has found, which takes ten minutes. `make test-slow` runs all of it and
holds this page to it; `make test` tries those that are known to go wrong in plain DTensor, and random programs.

`python -m tests.cluster.opinfo_all RESULTS` tries every sample of each, also with its dimensions written negative. Up
to four samples of each, of uneven sizes, have been tried so far: 15,217 cases right; those of `gather`, `scatter` and
pooling without a batch that were wrong are mended. Samples of `index_fill`, `index_put` and `_segment_reduce` have hung
or ended the process that tries them, and an error that is raised in a backward pass may end the controller: both are
open. The other samples have not been tried.

| inputs | sizes | right | refused | not tried |
|---|---|---|---|---|
{table}
"""

REFUSED = """
## Refused

What depends on values, needs memory that the controller does not have, or is no dense tensor.

| operation | in | what is said |
|---|---|---|
"""


@dataclass(frozen=True)
class Read:
    """What a page says."""

    right: frozenset[str]
    refused: frozenset[str]
    untried: frozenset[str]


def sorted_out(results: Mapping[str, Mapping[str, str]]) -> Read:
    """Operations by what became of them. Those with a wrong value are in none of the sets."""
    right, refused, untried = set(), set(), set()
    for name, by in results.items():
        tried = {told for told in by.values() if not told.startswith(UNTRIED)}
        if any("WRONG" in told or "HUNG" in told for told in tried):
            continue
        if not tried:
            untried.add(name)
        elif tried == {"ok"}:
            right.add(name)
        else:
            refused.add(name)
    return Read(frozenset(right), frozenset(refused), frozenset(untried))


def said(told: str) -> str:
    """An error as the page has it: without lines and addresses."""
    text = told.partition(": ")[2]
    text = re.sub(r" \(at [^)]*\)", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = text.replace("|", "\\|")
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " …"


def page(results: Mapping[str, Mapping[str, str]]) -> str:
    """The text of the page."""
    by = sorted_out(results)
    rows = []
    for word in cases.PLACEMENTS:
        for kind in cases.SIZES:
            told = Counter(
                "not tried" if each.startswith(UNTRIED) else "right" if each == "ok" else "refused"
                for each in (outcome[f"{kind} {word}"] for outcome in results.values())
            )
            rows.append(f"| {word} | {kind} | {told['right']} | {told['refused']} | {told['not tried']} |")
    text = HEAD.format(
        count=len(results),
        right=len(by.right),
        refused=len(by.refused),
        untried=len(by.untried),
        table="\n".join(rows),
    )
    text += REFUSED
    for name in sorted(by.refused):
        groups: dict[str, list[str]] = {}
        for case, told in results[name].items():
            if told != "ok" and not told.startswith(UNTRIED):
                groups.setdefault(said(told), []).append(case)
        for message, where in groups.items():
            everywhere = len(where) == len(results[name])
            text += f"| `{name}` | {'all' if everywhere else ', '.join(where)} | {message} |\n"
    for title, names in (("Not tried", by.untried), ("Right in all cases", by.right)):
        listed = textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)), 120, break_on_hyphens=False)
        text += f"\n## {title}\n\n{listed}\n"
    return text


def read(text: str) -> Read:
    """What a page says."""

    def names(title: str, pattern: str) -> frozenset[str]:
        section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        return frozenset(re.findall(pattern, section, re.MULTILINE))

    return Read(
        names("Right in all cases", r"`([^`]+)`"), names("Refused", r"^\| `([^`]+)`"), names("Not tried", r"`([^`]+)`")
    )


if __name__ == "__main__":
    PAGE.write_text(page(dict(map(json.loads, Path(sys.argv[1]).read_text().splitlines()))))
