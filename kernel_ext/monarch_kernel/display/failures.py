"""Failures as text for errors, and as a card where nobody waited: which rank, what happened, what to do next."""

from collections.abc import Callable
from typing import Any

from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.report import error_text, facts, last_lines_text

from .html import facts as facts_html
from .html import folded, framed, heading

Paint = Callable[[str, str], str]  # text, one of "title" "dim" "plain"

_TITLES = {
    "signal": "{who} died",
    "exit": "{who} ended",
    "host": "{who} is lost with its host",
    "init": "{who} could not be constructed",
    "spawn": "{who} could not be started",
    "stopped": "{who} is stopped",
    "owner": "{who} has no owner any more",
    "aborted": "{who} gave up",
    "undeliverable": "{who} cannot be reached",
}


def plain(text: str, _style: str) -> str:
    """No colours."""
    return text


def ansi(text: str, style: str) -> str:
    """Colours of a terminal, which notebooks show as well."""
    codes = {"title": "1", "dim": "2", "strong": "1"}  # the error box is red already
    return f"\033[{codes[style]}m{text}\033[0m" if style in codes else text


def title(failure: MeshFailure) -> str:
    """Who failed and how, in one line."""
    who = failure.mesh_name
    if failure.places:
        who = f"{who}, {failure._where()}"
    cause = failure.cause
    form = _TITLES.get(cause.kind, "{who} failed")
    line = form.format(who=who)
    origin = cause.origin
    if origin.kind == "signal" and origin.signal is not None:
        named = dict(facts(origin)).get("ended", f"by signal {origin.signal}")
        return f"{line}: killed {named}" + (", out of memory" if origin.oom else "")
    if origin.kind == "exit" and origin.exitcode is not None:
        return f"{line} with exit status {origin.exitcode}"
    text = next(iter((cause.text or origin.text).strip().splitlines()), "")
    return f"{line}: {text}" if text else line


def known(failure: MeshFailure) -> list[tuple[str, str]]:
    """Where it happened and what else it hit."""
    rows = [("mesh", f"{failure.mesh_name}, {failure._where()}"), *facts(failure.cause.origin)]
    if failure.also:
        rows.append(("also hit", ", ".join(failure.also)))
    return rows


def details(failure: MeshFailure) -> str:
    """The remote traceback, or the chain of owners that did not handle it; "" if there is none."""
    if failure.cause.kind in ("signal", "exit", "host", "stopped", "owner", "undeliverable"):
        return ""
    text = error_text(failure.cause)
    return text if "\n" in text else ""


def failure_text(failure: MeshFailure, paint: Paint = plain) -> str:
    """The whole story as lines."""
    story = details(failure)
    lines = [f"  {line}" for line in story.splitlines()] + ([""] if story else [])

    def line(what: str, value: str) -> str:
        return f"  {paint(what.ljust(9), 'dim')} {value}"

    lines += [line(what, value) for what, value in known(failure)]
    tail = last_lines_text(failure.last_lines)
    if tail:
        first, _, rest = tail.partition("\n")
        lines += [paint(first, "dim"), rest]
    lines.append(line("next", paint(failure.next_step, "strong")))
    return "\n".join(lines)


def failure_bundle(failure: MeshFailure) -> dict[str, Any]:
    """A failure as a display of its own."""
    head = title(failure)
    rows = known(failure)
    parts = [heading(head), facts_html(rows)]
    story = details(failure)
    if story:
        parts.append(folded("traceback", story, opened=len(story.splitlines()) < 16))
    if failure.last_lines:
        parts.append(folded("its last lines", "\n".join(failure.last_lines[-20:]), opened=True))
    parts.append(facts_html([("next", failure.next_step)]))
    return {"text/plain": f"{head}\n{failure_text(failure)}", "text/html": framed(*parts, kind="mnb-f")}
