"""Answers of many ranks drawn together: equal ones once, differing ones side by side, outliers, sparklines. Pure."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_nb.debug.records import Stopped, Value
from monarch_nb.debug.render.groups import named, ranks_of
from monarch_nb.debug.verbs import CommandAnswer, NamespaceVariable, NamespaceVariables

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_BARS = "▁▂▃▄▅▆▇█"
NAN_SIGN = "×"
UNUSUAL = 8  # times the usual distance from the median
Pair = tuple[Stopped, CommandAnswer]


def answer_text(answer: CommandAnswer) -> str:
    """Returns an answer as text."""
    parts = [answer.text.rstrip("\n")] if answer.text.strip() else []
    if answer.value is not None:
        parts.append(answer.value.text)
    parts += [f"{variable.name} = {variable.value.text}" for variable in answer.variables]
    if answer.error:
        parts.append(f"*** {answer.error}")
    return "\n".join(parts)


@dataclass(frozen=True)
class MergedAnswer:
    """A text, and the ranks whose answer it is."""

    text: str
    records: tuple[Stopped, ...]


def folded(pairs: Sequence[Pair]) -> list[tuple[MergedAnswer, CommandAnswer]]:
    """Equal answers once, with an example of each; answers that differ only in memory addresses are equal."""
    by_text: dict[str, list[tuple[str, Pair]]] = {}
    for record, answer in pairs:
        text = answer_text(answer)
        by_text.setdefault(_ADDRESS.sub("0x…", text), []).append((text, (record, answer)))
    return [
        (
            MergedAnswer(
                key if len({text for text, _ in members}) > 1 else members[0][0], tuple(pair[0] for _, pair in members)
            ),
            members[0][1][1],
        )
        for key, members in by_text.items()
    ]


def merged(pairs: Sequence[Pair]) -> list[MergedAnswer]:
    """Equal answers once; the commonest first."""
    return sorted((answer for answer, _ in folded(pairs)), key=lambda answer: -len(answer.records))


def merged_variables(answers: Mapping[int, NamespaceVariables]) -> dict[str, list[tuple[NamespaceVariable, list[int]]]]:
    """Returns the variables of ranks by name: each value once, the most frequent first, with the ranks that have it."""
    rows: dict[str, dict[NamespaceVariable, list[int]]] = {}
    for rank in sorted(answers):
        for variable in answers[rank].variables:
            rows.setdefault(variable.name, {}).setdefault(variable, []).append(rank)
    return {name: sorted(rows[name].items(), key=lambda value: -len(value[1])) for name in sorted(rows)}


def ranks_text(records: Sequence[Stopped], among: Sequence[Stopped]) -> str:
    """Returns the ranks, in the shortest clear form."""
    return ranks_of(records) if len({record.mesh for record in among}) == 1 else named(records)


def merged_text(pairs: Sequence[Pair]) -> str:
    """Answers to be read: equal ones once with their ranks, differing ones side by side."""
    records = [record for record, _ in pairs]
    answers = [answer for answer in merged(pairs) if answer.text]
    if not answers:
        return ""
    if len(pairs) == 1:
        return answers[0].text
    if len(answers) == 1 and len(answers[0].records) == len(pairs):
        return f"{answers[0].text}  (all {len(pairs)})" if "\n" not in answers[0].text else answers[0].text
    if all("\n" not in answer.text for answer in answers):
        width = min(60, max(len(answer.text) for answer in answers))
        return "\n".join(f"{answer.text.ljust(width)}  {ranks_text(answer.records, records)}" for answer in answers)
    return "\n".join(
        f"── {ranks_text(answer.records, records) or named(answer.records)}\n{answer.text}" for answer in answers
    )


# -- one expression over the ranks -------------------------------------------------------------------------------------


def number_of(value: Value | None) -> float | None:
    """Returns the number that represents a value: of a tensor its mean, NaN if it contains any."""
    if value is None:
        return None
    if value.number is not None:
        return value.number
    if value.tensor is not None:
        return math.nan if value.tensor.nan else value.tensor.mean
    return None


def outliers(pairs: Sequence[Pair]) -> list[tuple[MergedAnswer, float]]:
    """Values by rank, the most unusual first, with how unusual each is: inf for NaN and errors, else the distance from
    the median in units of the usual distance; where they are no numbers, the rarest first.
    """
    every = merged(pairs)
    by_text = {group.text: answer for group, answer in folded(pairs)}
    numbers = {text: number_of(answer.value) for text, answer in by_text.items()}
    finite = [n for _, answer in pairs if (n := number_of(answer.value)) is not None and math.isfinite(n)]
    middle = statistics.median(finite) if finite else 0.0
    usual = statistics.median([abs(n - middle) for n in finite]) if finite else 0.0
    scale = usual or abs(middle) * 1e-9 or 1e-12
    ranked = []
    for answer in every:
        number = numbers[answer.text]
        if by_text[answer.text].error:
            distance = math.inf
        elif number is None:
            distance = 0.0 if len(every) == 1 else len(pairs) / len(answer.records)
        else:
            distance = abs(number - middle) / scale if math.isfinite(number) else math.inf
        ranked.append((answer, distance))
    return sorted(ranked, key=lambda pair: -pair[1])


def diff_text(expression: str, pairs: Sequence[Pair]) -> str:
    """`diff EXPR`: the outliers first."""
    records = [record for record, _ in pairs]
    ranked = outliers(pairs)
    if len(ranked) == 1:
        text = ranked[0][0].text
        return f"{expression}: equal on all {len(pairs)}: {text}" if len(pairs) > 1 else f"{expression}: {text}"
    lines = [f"{expression}: {len(ranked)} different values on {len(pairs)} ranks, the most unusual first"]
    width = min(60, max(len(answer.text.splitlines()[0]) for answer, _ in ranked))
    for answer, distance in ranked[:40]:
        first, *rest = answer.text.splitlines()
        mark = "!" if distance > UNUSUAL else " "
        lines.append(f" {mark} {first.ljust(width)}  {ranks_text(answer.records, records)}")
        lines += [f"   {line}" for line in rest[:5]]
    if len(ranked) > 40:
        lines.append(f"   … {len(ranked) - 40} more")
    return "\n".join(lines)


def sparkline(numbers: Sequence[float | None]) -> str:
    """Numbers as a row of bars; × is not a number, · is nothing."""
    finite = [n for n in numbers if n is not None and math.isfinite(n)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    bars = []
    for number in numbers:
        if number is None:
            bars.append("·")
        elif not math.isfinite(number):
            bars.append(NAN_SIGN)
        else:
            share = (number - low) / (high - low) if high > low else 0.5
            bars.append(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(bars)


def watch_text(expression: str, pairs: Sequence[Pair]) -> str:
    """`watch EXPR`: a sparkline over the ranks in their order."""
    ordered = sorted(pairs, key=lambda pair: (pair[0].name, pair[0].rank))
    numbers = [number_of(answer.value) for _, answer in ordered]
    finite = [n for n in numbers if n is not None and math.isfinite(n)]
    range_text = f"  {min(finite):.4g} … {max(finite):.4g}" if finite else ""
    odd = [record for (record, _), n in zip(ordered, numbers, strict=True) if n is not None and not math.isfinite(n)]
    if odd:
        range_text += f"  {NAN_SIGN} {ranks_text(odd, [record for record, _ in ordered]) or 'not a number'}"
    if not finite and not odd:
        first = next((answer for _, answer in ordered), None)
        range_text = f"  no number: {answer_text(first)}" if first is not None else "  nothing is stopped"
    return f"{expression}  {sparkline(numbers)}{range_text}"


def plain(value: Value | None) -> Any:
    """Returns a value for programs: its number where it has one, else its text."""
    if value is None:
        return None
    if value.type == "int" and value.number is not None and abs(value.number) < 2**53:
        return int(value.number)
    if value.type == "bool":
        return bool(value.number)
    return value.number if value.number is not None else value.text


@dataclass(frozen=True)
class Answers:
    """Results of a command: the text to show, and the answers by rank."""

    command: str
    text: str
    pairs: tuple[Pair, ...] = ()

    @property
    def values(self) -> dict[int, Any]:
        """Values by rank: numbers as numbers, others as text; None without a value."""
        return {record.rank: plain(answer.value) for record, answer in self.pairs}

    @property
    def summaries(self) -> dict[int, Value | None]:
        """Summaries of values by rank: type, and for tensors shape, extremes and NaN count."""
        return {record.rank: answer.value for record, answer in self.pairs}

    @property
    def errors(self) -> dict[int, str]:
        """Errors by rank."""
        return {record.rank: answer.error for record, answer in self.pairs if answer.error}

    def __str__(self) -> str:
        return self.text
