"""Stopped ranks as plain JSON for views: groups, the tree of stacks, values by rank. Pure."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_nb.debug.records import Frame, Stopped, Value
from monarch_nb.debug.render.groups import (
    FileName,
    Missing,
    StackGroup,
    StackNode,
    grouped,
    named,
    ranks_of,
    short,
    tree,
)
from monarch_nb.debug.render.merge import (
    UNUSUAL,
    MergedAnswer,
    Pair,
    folded,
    number_of,
    outliers,
    ranks_text,
    sparkline,
)
from monarch_nb.debug.verbs import CommandAnswer

Picture = dict[str, Any]
_ANONYMOUS = re.compile(r"<[^<>]*\bat 0x[0-9a-fA-F]+>$|<module |<function |<class |<bound method ")
LONGEST = 400  # characters of one value
MOST = 100  # variables
MOST_VALUES = 8  # different values of one variable that the view has room for


def picture_of(
    records: Sequence[Stopped],
    *,
    sizes: Mapping[str, int] | None = None,
    missing: Sequence[Missing] = (),
    name: FileName = short,
    index: Callable[[Stopped], int] = lambda record: record.rank,
) -> Picture:
    """Returns the document of all stopped ranks: `groups`, `tree`, `missing`. `index` maps ranks to indices."""
    by_id = {record.session: record for record in records}
    nodes = tree((record.session, record.stack) for record in records)
    return {
        "stopped": len(records),
        "groups": [_group(group, (sizes or {}).get(group.first.mesh), name, index) for group in grouped(records)],
        "tree": [_node(node, by_id, name) for node in nodes],
        "missing": [
            {"name": row.name, "where": row.where(points), "what": activity}
            for row in missing
            for activity, points in row.by_activity().items()
        ],
    }


def _group(group: StackGroup, size: int | None, name: FileName, index: Callable[[Stopped], int]) -> Picture:
    first = group.first
    selected = first.selected_frame
    reasons = list(dict.fromkeys(record.reason for record in group.records))
    return {
        "mesh": first.mesh,
        "name": first.name,
        "where": ranks_of(group.records),
        "sessions": [record.session for record in group.records],
        "ranks": [index(record) for record in group.records],
        "of": size,
        "endpoint": first.endpoint,
        "thread": group.thread,
        "reason": reasons[0] if len(reasons) == 1 else f"{reasons[0]} and {len(reasons) - 1} other reasons",
        "note": first.note,
        "post_mortem": first.post_mortem,
        "since": min(record.since for record in group.records),
        **_frame(first.frame, name),
        "stack": [_frame(frame, name) for frame in first.stack],
        "current": first.current,
        "source": {**_frame(selected, name), "first": first.first, "lines": list(first.source)},
    }


def _frame(frame: Frame, name: FileName) -> Picture:
    return {
        "file": name(frame.file),
        "path": frame.file,
        "line": frame.line,
        "function": frame.function,
        "text": frame.text,
    }


def _node(node: StackNode, by_id: Mapping[str, Stopped], name: FileName) -> Picture:
    return {
        **_frame(node.frame, name),
        "count": len(node.owners),
        "where": named([by_id[rank_id] for rank_id in node.owners]),
        "sessions": list(node.owners),
        "below": [_node(child, by_id, name) for child in node.children],
    }


# -- values by rank ----------------------------------------------------------------------------------------------------


def values_by_rank(expression: str, pairs: Sequence[Pair]) -> Picture:
    """Values of an expression by rank, and a sparkline over the ranks in order. Unusual values come first, others in
    the order of ranks; where there are too many to show, those farthest from the usual remain.
    """
    ordered = sorted(pairs, key=lambda pair: (pair[0].name, pair[0].rank))
    by_text = {group.text: answer for group, answer in folded(pairs)}
    among = [record for record, _ in pairs]
    ranked = outliers(pairs)
    if len(ranked) <= MOST_VALUES:
        ranked.sort(
            key=lambda item: (item[1] <= UNUSUAL, min((record.name, record.rank) for record in item[0].records))
        )
    return {
        "expression": expression,
        "spark": sparkline([number_of(answer.value) for _, answer in ordered]),
        "values": [_value(answer, distance, by_text[answer.text], among) for answer, distance in ranked],
    }


def variables_by_rank(pairs: Sequence[Pair]) -> list[Picture]:
    """Returns the local variables of ranks, each with its values by rank: numbers and tensors first, objects without
    a text of their own last; of each kind, different values first.
    """
    by_name: dict[str, list[Pair]] = {}
    for record, answer in pairs:
        for variable in answer.variables:
            answer = CommandAnswer(session=record.session, value=variable.value)
            by_name.setdefault(variable.name, []).append((record, answer))
    rows = [
        {"name": expression, **values_by_rank(expression, of_name)}
        for expression, of_name in list(by_name.items())[:MOST]
    ]
    for row in rows:
        del row["expression"]
    return sorted(rows, key=lambda row: (_kind(by_name[row["name"]]), len(row["values"]) == 1))


def _kind(pairs: Sequence[Pair]) -> int:
    """0 for numbers and tensors, 1 for values with a text of their own, 2 for other objects."""
    values = [answer.value for _, answer in pairs if answer.value is not None]
    if any(value.number is not None or value.tensor is not None for value in values):
        return 0
    return 2 if values and all(_ANONYMOUS.match(value.text) for value in values) else 1


def _value(merged: MergedAnswer, distance: float, answer: CommandAnswer, among: Sequence[Stopped]) -> Picture:
    value = answer.value
    number = number_of(value)
    odd = "" if number is None or math.isfinite(number) else "NaN" if math.isnan(number) else "infinite"
    return {
        "text": merged.text if len(merged.text) <= LONGEST else f"{merged.text[:LONGEST]}…",
        "where": ranks_text(merged.records, among) or named(merged.records),
        "sessions": [record.session for record in merged.records],
        "type": value.type if value is not None else "",
        "number": number if number is not None and not odd else None,  # JSON knows no others
        "odd": odd,
        "error": bool(answer.error),
        "unusual": distance > UNUSUAL,
        "tensor": _tensor(value),
    }


def _tensor(value: Value | None) -> Picture | None:
    if value is None or value.tensor is None:
        return None
    tensor = value.tensor
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "nan": tensor.nan,
        "inf": tensor.inf,
    }
