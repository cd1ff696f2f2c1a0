"""A failure as faces are told it."""

from collections.abc import Callable
from typing import Any

from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.report import error_text, facts

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


def details(failure: MeshFailure) -> str:
    """The remote traceback, or the chain of owners that did not handle it; "" if there is none."""
    if failure.cause.kind in ("signal", "exit", "host", "stopped", "owner", "undeliverable"):
        return ""
    text = error_text(failure.cause)
    return text if "\n" in text else ""


def record(failure: MeshFailure, now: float, readable: Callable[[str], str] = str) -> dict[str, Any]:
    """What docs/protocol.md says of a failure, but for its mesh and ranks; None is what is not known.

    `readable` writes file names in tracebacks as people know them.
    """
    origin = failure.cause.origin
    return {
        "name": str(failure.mesh_name),
        "kind": "procs" if failure.procs else "actors",
        "where": failure._where(),
        "title": title(failure),
        "cause": failure.cause.kind,
        "host": failure.host or None,
        "pid": origin.pid or None,
        "exitcode": origin.exitcode,
        "signal": origin.signal,
        "oom": origin.oom or None,
        "at": failure.at or now,
        "detected": now,
        "traceback": readable(details(failure)) or None,
        "last_lines": list(failure.last_lines[-40:]) or None,
        "also": [str(name) for name in failure.also] or None,
        "next": failure.next_step,
        "report": readable(failure.report()),
    }
