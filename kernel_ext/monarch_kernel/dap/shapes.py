"""Values, frames and scopes of ranks in the shapes of the debug adapter protocol. Pure."""

import html
from collections.abc import Sequence
from typing import Any

from monarch_nb.debug import Stopped, Tensor, Value
from monarch_nb.debug.messages import Answer
from monarch_nb.debug.records import Variable
from monarch_nb.debug.render import named

Message = dict[str, Any]
SCALARS = ("int", "float", "bool", "str")  # which JupyterLab shows by their values; all others by their types


def variable(told: Variable, reference: int, *, by_type: bool) -> Message:
    """A variable. `by_type`: the front end shows a value that is no scalar by its type, which says too little."""
    shown = told.value.text
    kind = shown if by_type and told.value.type not in SCALARS else told.value.type
    row: Message = {"name": told.name, "value": shown, "type": kind, "variablesReference": reference}
    if told.named:
        row["namedVariables"] = told.named
    if told.indexed:
        row["indexedVariables"] = told.indexed
    if told.expression:
        row["evaluateName"] = told.expression
    return row


def rest(count: int) -> Message:
    """Stands for variables that were not asked for."""
    return {"name": "…", "value": f"{count} more", "type": f"{count} more", "variablesReference": 0}


def text_of_answer(answer: Answer) -> str:
    """What there is to read in one."""
    parts = [answer.text.rstrip("\n")] if answer.text.strip() else []
    if answer.value is not None:
        parts.append(answer.value.text)
    return "\n".join(parts)


def rich(name: str, pairs: Sequence[tuple[Stopped, Answer]], own_html: str = "") -> Message:
    """A value as a page: what it looks like on the rank that is looked at, and its differences on the others."""
    first = pairs[0][1]
    plain = first.error or (first.value.text if first.value is not None else "None")
    parts = []
    if own_html:
        parts.append(own_html)
    elif first.value is not None and first.value.tensor is not None:
        parts.append(_tensor(first.value, first.value.tensor))
    else:
        parts.append(f"<pre>{html.escape(plain)}</pre>")
    if len(pairs) > 1:
        parts.append(_by_rank(pairs))
    title = f"<p><b>{html.escape(name)}</b> on {html.escape(named([pairs[0][0]]))}</p>"
    return {"data": {"text/plain": plain, "text/html": f"<div>{title}{''.join(parts)}</div>"}, "metadata": {}}


def _tensor(value: Value, tensor: Tensor) -> str:
    numbers = {"shape": " × ".join(map(str, tensor.shape)) or "scalar", "dtype": tensor.dtype}
    numbers |= {"device": tensor.device} if tensor.device else {}
    for label, number in (("least", tensor.least), ("greatest", tensor.most), ("mean", tensor.mean)):
        if number is not None:
            numbers[label] = f"{number:.6g}"
    numbers |= {"NaN": str(tensor.nan)} if tensor.nan else {}
    numbers |= {"infinite": str(tensor.inf)} if tensor.inf else {}
    if tensor.step > 1:
        numbers["seen"] = f"every {tensor.step}th element"
    rows = "".join(f"<tr><th>{label}</th><td>{html.escape(text)}</td></tr>" for label, text in numbers.items())
    few = value.text.partition("  ")[0] if value.text.startswith("[") else ""
    return f"<table>{rows}</table>" + (f"<pre>{html.escape(few)}</pre>" if few else "")


def _by_rank(pairs: Sequence[tuple[Stopped, Answer]]) -> str:
    by_text: dict[str, list[Stopped]] = {}
    for record, answer in pairs:
        text = answer.error or (answer.value.text if answer.value is not None else "None")
        by_text.setdefault(text, []).append(record)
    rows = "".join(
        f"<tr><td>{html.escape(named(records))}</td><td>{html.escape(text[:400])}</td></tr>"
        for text, records in sorted(by_text.items(), key=lambda each: len(each[1]))
    )
    return f"<table><tr><th>ranks</th><th>value</th></tr>{rows}</table>"
