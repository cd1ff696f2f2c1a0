"""The measured facts, as tables that a page can show."""

from collections.abc import Iterable, Mapping
from typing import Any

Facts = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, list[dict[str, Any]]]]

TITLES = {
    "evaluation": "400 evaluations on four workers",
    "training": "Training on four ranks, one of them killed midway",
    "parameters": "64 MB of parameters from a learner to four generators",
    "broken_rank": "One rank of eight raises",
    "elastic": "Two workers become four, and two again",
}
COLUMNS = {  # the columns of each story: the fact, and its title
    "evaluation": (("lines", "lines"), ("ready s", "until the first answer, s"), ("seconds", "evaluations, s")),
    "training": (
        ("lines", "lines"),
        ("told ms", "death reported after, ms"),
        ("goes on ms", "next step done after, ms"),
        ("seconds", "whole training, s"),
    ),
    "parameters": (("lines", "lines"), ("ms a version", "one version to all four, ms")),
    "broken_rank": (("lines", "lines"), ("says", "names the rank"), ("where", "names the line that raised")),
    "elastic": (("lines", "lines"), ("grown ms", "grown after, ms"), ("shrunk ms", "shrunk after, ms")),
}
RANK = ("gpus=5", "gpus: 5", "gpus=5/8", "rank=5", "Rank 5", "[5:", "engine 5", "'gpus': 5")
LINE = "normalised"


def best(runs: Iterable[Facts]) -> dict[str, Any]:
    """The smallest of each figure, and the last of the messages."""
    result: dict[str, Any] = {}
    for facts in runs:
        for name, value in facts.items():
            before = result.get(name)
            smaller = isinstance(value, int | float) and isinstance(before, int | float)
            result[name] = min(before, value) if smaller else value
    text = str(result.get("what is said", ""))
    result["says"] = "yes" if any(name in text for name in RANK) else "no"
    result["where"] = "yes" if LINE in text else "no"
    return result


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return "" if value is None else str(value)


def markdown(environment: Facts, runs: Runs, systems: Iterable[str]) -> str:
    """All tables, the best of each system's runs in each."""
    parts = [", ".join(f"{name}: {value}" for name, value in environment.items())]
    for story, columns in COLUMNS.items():
        parts += ["", f"## {TITLES[story]}", "", "| | " + " | ".join(title for _, title in columns) + " |"]
        parts.append("|---" * (len(columns) + 1) + "|")
        for system in systems:
            facts = best(runs[story].get(system, ()))
            if "lines" not in facts:
                parts.append(f"| {system} | cannot do that |" + " |" * (len(columns) - 1))
            else:
                wrong = " (did not end well)" if "wrong" in facts else ""
                parts.append(f"| {system}{wrong} | " + " | ".join(cell(facts.get(name)) for name, _ in columns) + " |")
        if story == "training":
            for system in systems:
                text = str(best(runs[story].get(system, ())).get("what is said", ""))
                if text:
                    lines = [line for line in text.splitlines() if line.strip()]
                    first = max((number for number, line in enumerate(lines) if "Error: " in line), default=0)
                    parts += ["", f"{system} says, in {len(lines)} lines, the last of which are:"]
                    parts += ["", "```text", *lines[first:], "```"]
    return "\n".join(parts) + "\n"
