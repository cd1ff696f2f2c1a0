"""docs/tensor-coverage.md, from the results of PyTorch's samples.

`python -m tests.cluster.opinfo_page RESULTS…` writes it, from files that `python -m tests.cluster.opinfo_all` has made,
each of other sizes.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tensor-coverage.md"
LONGEST = 180  # of an error, in the table

HEAD = """# Which operations run on sharded tensors

PyTorch tests itself with samples for {count} operations. Here {tried} of their {known:,} samples{sizes} ran on
sharded tensors, forward and backward, and once more with their dimensions as negative numbers. Values, gradients and
inputs that are written to are compared with those of local tensors. Inputs are replicated on two ranks, sharded by
rows, sharded by columns, or partial sums, and sharded in two ways on four ranks in a square. The ranks are threads
that run everything except processes and transport. For operations that draw random numbers, only shapes and types are
compared, because a mesh draws other numbers than one process.

**{cases:,} cases are right, {wrong} wrong.** {right} operations are right in all of their cases, {refused} are
refused in some or all, with an error that says why, and {untried} cannot be tried: their samples do not run on local
tensors, or this build of PyTorch has none.

`python -m tests.cluster.opinfo_page RESULTS` writes this page from the results of
`python -m tests.cluster.opinfo_all RESULTS`, which can be interrupted and continued, and can be limited to fewer
samples of each operation. `make test` tries the operations that are known to fail in plain DTensor, and random
programs; `make test-slow` tries one sample of every operation.

| inputs | right | refused |
|---|---|---|
{table}
"""

REFUSED = """
## Refused

These operations depend on values (in `index_fill` and `index_put`, the gradient of a value that is written), need
memory that the controller does not have, or give a tensor that is not dense.

| operation | cases | error |
|---|---|---|
"""


@dataclass(frozen=True)
class Read:
    right: frozenset[str]
    refused: frozenset[str]
    untried: frozenset[str]


Results = Mapping[str, Mapping[str, Any]]  # by operation: its cases, and how many samples were tried, of how many


def results_of(paths: Iterable[str]) -> Results:
    """The results of all files. Raises ValueError if two have the same case of an operation."""
    results: dict[str, Any] = {}
    for path in paths:
        for name, new, _ in map(json.loads, Path(path).read_text().splitlines()):
            entry = results.setdefault(name, {"cases": {}, "tried": 0, "known": 0})
            if twice := entry["cases"].keys() & new["cases"]:
                raise ValueError(f"{name}: {sorted(twice)} are in {path} and in another file")
            entry["cases"].update(new["cases"])
            entry["tried"] += new["tried"]
            entry["known"] += new["known"]
    return results


def sorted_out(results: Results) -> Read:
    """Operations by their outcome. Those with a wrong value are in none of the sets."""
    right, refused, untried = set(), set(), set()
    for name, result in results.items():
        cases = result["cases"].values()
        if any(case["wrong"] for case in cases):
            continue
        if any(case["refused"] for case in cases):
            refused.add(name)
        elif any(case["right"] for case in cases):
            right.add(name)
        else:
            untried.add(name)
    return Read(frozenset(right), frozenset(refused), frozenset(untried))


def message_of(outcome: str) -> str:
    """An error as the page shows it: without lines, addresses and the numbers of meshes."""
    text = outcome.partition(": ")[2]
    text = re.sub(r" \(at [^)]*\)", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = re.sub(r"mesh:\d+", "mesh", text)
    text = text.replace("|", "\\|")
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " …"


def page(results: Results) -> str:
    """The text of the page."""
    by = sorted_out(results)
    ways: dict[str, list[int]] = {}
    for result in results.values():
        for title, case in result["cases"].items():
            counts = ways.setdefault(title, [0, 0, 0])
            counts[0] += case["right"]
            counts[1] += sum(case["refused"].values())
            counts[2] += len(case["wrong"])
    kinds = list(dict.fromkeys(title.partition(" ")[0] for title in ways))
    tried, total = (sum(result[count] for result in results.values()) for count in ("tried", "known"))
    text = HEAD.format(
        count=len(results),
        sizes=f" of {kinds[0]} sizes" if len(kinds) == 1 else "",
        tried="all" if tried == total else f"{tried:,}",
        known=total,
        cases=sum(right for right, _, _ in ways.values()),
        wrong=sum(wrong for _, _, wrong in ways.values()) or "none",
        right=len(by.right),
        refused=len(by.refused),
        untried=len(by.untried),
        table="\n".join(f"| {title} | {right:,} | {refused:,} |" for title, (right, refused, _) in ways.items()),
    )
    text += REFUSED
    for name in sorted(by.refused):
        cases = results[name]["cases"].values()
        samples = sum(case["right"] + sum(case["refused"].values()) for case in cases)
        messages: dict[str, int] = {}
        for case in cases:
            for outcome, count in case["refused"].items():
                messages[message_of(outcome)] = messages.get(message_of(outcome), 0) + count
        for message, count in messages.items():
            text += f"| `{name}` | {'all' if count == samples else f'{count} of {samples}'} | {message} |\n"
    for title, names in (("Not tried", by.untried), ("Right in all cases", by.right)):
        listed = textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)), 120, break_on_hyphens=False)
        text += f"\n## {title}\n\n{listed}\n"
    return text


def read(text: str) -> Read:
    def names(title: str, pattern: str) -> frozenset[str]:
        section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        return frozenset(re.findall(pattern, section, re.MULTILINE))

    return Read(
        names("Right in all cases", r"`([^`]+)`"), names("Refused", r"^\| `([^`]+)`"), names("Not tried", r"`([^`]+)`")
    )


if __name__ == "__main__":
    PAGE.write_text(page(results_of(sys.argv[1:])))
