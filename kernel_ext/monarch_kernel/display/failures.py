"""Failures as text for errors, and as a card where nobody waited: which rank, what happened, what to do next."""

from collections.abc import Callable
from typing import Any

from monarch_nb.store.failures import details, title
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.report import dump_text, facts, last_lines_text
from monarch_nb.wire import ActorError

from .html import facts as facts_html
from .html import folded, framed, heading, lab_button

Paint = Callable[[str, str], str]  # text, one of "title" "dim" "plain"


def plain(text: str, _style: str) -> str:
    """No colours."""
    return text


def ansi(text: str, style: str) -> str:
    """Colours of a terminal, which notebooks show as well."""
    codes = {"title": "1", "dim": "2", "strong": "1"}  # the error box is red already
    return f"\033[{codes[style]}m{text}\033[0m" if style in codes else text


def known(failure: MeshFailure) -> list[tuple[str, str]]:
    """Where it happened and what else it hit."""
    rows = [("mesh", f"{failure.mesh_name}, {failure._where()}"), *facts(failure.cause.origin)]
    if failure.also:
        rows.append(("also hit", ", ".join(failure.also)))
    return rows


def failure_text(failure: MeshFailure, paint: Paint = plain) -> str:
    """The whole story as lines."""
    story = details(failure)
    lines = [f"  {line}" for line in story.splitlines()] + ([""] if story else [])

    def line(what: str, value: str) -> str:
        return f"  {paint(what.ljust(9), 'dim')} {value}"

    lines += [line(what, value) for what, value in known(failure)]
    for tail in filter(None, (last_lines_text(failure.last_lines), dump_text(failure.cause.origin.dump))):
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
    if failure.cause.origin.dump:
        parts.append(folded("where it crashed", "\n".join(failure.cause.origin.dump), opened=True))
    parts += [facts_html([("next", failure.next_step)]), heal_button(failure)]
    return {"text/plain": f"{head}\n{failure_text(failure)}", "text/html": framed(*parts, kind="mnb-f")}


def failure_bar(failure: MeshFailure) -> dict[str, Any]:
    """One line about a failure, above an error that tells all of it."""
    head = title(failure)
    return {"text/plain": head, "text/html": framed(heading(head), heal_button(failure), kind="mnb-f")}


def raised_bar(error: ActorError) -> dict[str, Any]:
    """One line about a call that has raised, above an error that tells all of it."""
    head = raised_title(error)
    return {"text/plain": head, "text/html": framed(heading(head), kind="mnb-f")}


def raised_title(error: ActorError) -> str:
    """Which call failed, and on which ranks."""
    return error.summary.partition("\n")[0].removeprefix("Actor call ").rstrip(".")


def heal_button(failure: MeshFailure) -> str:
    """Heals what it hit, in JupyterLab with the panel."""
    if not failure.mesh_uid:
        return ""
    return lab_button(f"Heal {failure.mesh_name}", "monarch-nb:heal", {"mesh": failure.mesh_uid})
