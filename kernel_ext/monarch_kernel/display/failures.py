"""Failures as HTML: a card where nobody waited, a line above an error that tells the rest."""

from typing import Any

from monarch_nb.store.failures import Record, rows, tails, text
from monarch_nb.wire import ActorError

from .html import facts, folded, framed, heading, lab_button


def ansi(text: str, style: str) -> str:
    """Colours of a terminal, which notebooks show as well."""
    codes = {"title": "1", "dim": "2", "strong": "1"}  # the error box is red already
    return f"\033[{codes[style]}m{text}\033[0m" if style in codes else text


def failure_bundle(one: Record) -> dict[str, Any]:
    """A failure as a display of its own."""
    parts = [heading(one["title"]), facts(rows(one))]
    story = one.get("traceback")
    if story:
        parts.append(folded("traceback", story, opened=len(story.splitlines()) < 16))
    found = tails(one)
    for at, (where, lines) in enumerate(found):
        named = f"the last lines of {where}" if where else "its last lines" if len(one["ranks"]) < 2 else "last lines"
        parts.append(folded(named, "\n".join(lines[-20:]), opened=at == 0))
    if one.get("dump"):
        parts.append(folded("where it crashed", "\n".join(one["dump"]), opened=True))
    parts += [facts([("next", one["next"])]), _heal_button(one)]
    return {"text/plain": f"{one['title']}\n{text(one)}", "text/html": framed(*parts, kind="mnb-f")}


def failure_bar(one: Record) -> dict[str, Any]:
    """One line about a failure, above an error that tells all of it."""
    return {"text/plain": one["title"], "text/html": framed(heading(one["title"]), _heal_button(one), kind="mnb-f")}


def raised_bar(error: ActorError) -> dict[str, Any]:
    """One line about a call that has raised, above an error that tells all of it."""
    head = raised_title(error)
    return {"text/plain": head, "text/html": framed(heading(head), kind="mnb-f")}


def raised_title(error: ActorError) -> str:
    """Which call failed, and on which ranks."""
    return error.summary.partition("\n")[0].removeprefix("Actor call ").rstrip(".")


def _heal_button(one: Record) -> str:
    """Heals what it hit, in JupyterLab with the panel."""
    if not one.get("mesh"):
        return ""
    return lab_button(f"Heal {one['name']}", "monarch-nb:heal", {"mesh": one["mesh"]})
