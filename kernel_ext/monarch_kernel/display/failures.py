"""Failures as HTML: a card if no call waited, a bar above an error that has the details."""

from typing import Any

from monarch_nb.store import FailureFields
from monarch_nb.store.failures import rows, tails, text
from monarch_nb.wire import ActorError

from .html import facts, folded, framed, heading, lab_button


def ansi(text: str, style: str) -> str:
    """Terminal colours, which notebooks show as well."""
    codes = {"title": "1", "dim": "2", "strong": "1"}  # the error box is red already
    return f"\033[{codes[style]}m{text}\033[0m" if style in codes else text


def failure_bundle(failure: FailureFields) -> dict[str, Any]:
    """Returns a failure as a display of its own."""
    parts = [heading(failure["title"]), facts(rows(failure))]
    trace = failure.get("traceback")
    if trace:
        parts.append(folded("traceback", trace, opened=len(trace.splitlines()) < 16))
    for index, (source, lines) in enumerate(tails(failure)):
        title = (
            f"the last lines of {source}" if source else "its last lines" if len(failure["ranks"]) < 2 else "last lines"
        )
        parts.append(folded(title, "\n".join(lines[-20:]), opened=index == 0))
    dump = failure.get("dump")
    if dump:
        parts.append(folded("where it crashed", "\n".join(dump), opened=True))
    parts += [facts([("next", failure["next"])]), _heal_button(failure)]
    return {"text/plain": f"{failure['title']}\n{text(failure)}", "text/html": framed(*parts, kind="mnb-f")}


def failure_bar(failure: FailureFields) -> dict[str, object]:
    """One line about a failure, above the error that describes it."""
    return {
        "text/plain": failure["title"],
        "text/html": framed(heading(failure["title"]), _heal_button(failure), kind="mnb-f"),
    }


def raised_bar(error: ActorError) -> dict[str, object]:
    """One line about a call that raised, above its error."""
    head = raised_title(error)
    return {"text/plain": head, "text/html": framed(heading(head), kind="mnb-f")}


def raised_title(error: ActorError) -> str:
    """Returns the call that failed, and its ranks."""
    return error.summary.partition("\n")[0].removeprefix("Actor call ").rstrip(".")


def _heal_button(failure: FailureFields) -> str:
    """Returns a button that heals the mesh, in JupyterLab with the panel."""
    if not failure.get("mesh"):
        return ""
    return lab_button(f"Heal {failure['name']}", "monarch-nb:heal", {"mesh": failure["mesh"]})
