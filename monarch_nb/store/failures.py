"""The display of a failure, for one rank or many: title, facts and full text."""

import time
from collections.abc import Callable
from typing import cast

from monarch_nb.store.records import FailureFields
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.failure import error_text, facts
from monarch_nb.wire import host_name

# Verbs for one rank, and for several.
_TITLES = {
    "signal": ("died", "died"),
    "exit": ("ended", "ended"),
    "killed": ("was killed", "were killed"),
    "host": ("is lost with its host", "are lost with their host"),
    "init": ("could not be constructed", "could not be constructed"),
    "spawn": ("could not be started", "could not be started"),
    "stopped": ("is stopped", "are stopped"),
    "left": ("was left to run by itself", "were left to run by themselves"),
    "taken": ("was taken over", "were taken over"),
    "shrunk": ("has left the mesh", "have left the mesh"),
    "owner": ("has lost its owner", "have lost their owner"),
    "aborted": ("gave up", "gave up"),
    "undeliverable": ("cannot be reached", "cannot be reached"),
}
_FAILED = ("failed", "failed")
_LINES = 20  # last lines of output, in the text of a failure
_PIDS = 16  # listed at most

Paint = Callable[[str, str], str]  # text, one of "title" "dim" "strong" "plain"


def plain(text: str, _style: str) -> str:
    """Returns a text without colours."""
    return text


def title(failure: MeshFailure) -> str:
    """Returns one line: the mesh, its ranks, and the kind of failure."""
    return f"{_subject(failure)}{_manner(failure)}"


def _subject(failure: MeshFailure) -> str:
    cause, count = failure.cause, len(failure.places)
    single, several = _TITLES.get(cause.kind, _FAILED)
    if cause.kind == "host" and ", " in cause.host:
        several = "are lost with their hosts"
    if count > 1:
        part = "" if count == failure.size else f", {failure.where}"
        return f"{failure.mesh_name}{part}: {count} of {failure.size} ranks {several}"
    return f"{failure.mesh_name}{f', {failure.where}' if failure.places else ''} {single}"


def _manner(failure: MeshFailure) -> str:
    cause = failure.cause
    origin = cause.origin
    if origin.kind == "signal" and origin.signal is not None:
        named = dict(facts(origin)).get("ended", f"by signal {origin.signal}")
        comma = "," if len(failure.places) > 1 else ":"
        return f"{comma} killed {named}" + (", out of memory" if origin.oom else "")
    if origin.kind == "exit" and origin.exitcode is not None:
        return f" with exit status {origin.exitcode}"
    text = _text(failure)
    return f": {text}" if text else ""


def _text(failure: MeshFailure) -> str:
    cause = failure.cause
    return next(iter((cause.text or cause.origin.text).strip().splitlines()), "")


def details(failure: MeshFailure) -> str:
    """Returns the remote traceback, or the chain of owners that did not handle the failure; "" if there is none."""
    if failure.cause.kind in ("signal", "exit", "host", "stopped", "owner", "undeliverable"):
        return ""
    text = error_text(failure.cause)
    return text if "\n" in text else ""


def record(failure: MeshFailure, now: float, readable: Callable[[str], str] = str) -> FailureFields:
    """Returns the fields of a failure in docs/protocol.md except its mesh and ranks; None for unknown values.

    `readable` replaces file names in tracebacks by display names.
    """
    origin = failure.cause.origin
    return {
        "name": str(failure.mesh_name),
        "kind": "procs" if failure.procs else "actors",
        "where": failure.where,
        "title": title(failure),
        "cause": failure.cause.kind,
        "text": _text(failure) or None,
        "ended_by": dict(facts(origin)).get("ended"),
        "host": host_name(failure.host) or None,
        "pid": origin.pid or None,
        "exitcode": origin.exitcode,
        "signal": origin.signal,
        "oom": origin.oom or None,
        "memory": dict(facts(origin)).get("memory"),
        "at": failure.at or now,
        "detected": now,
        "traceback": readable(details(failure)) or None,
        "last_lines": list(failure.last_lines[-40:]) or None,
        "dump": list(origin.dump) or None,
        "also": [str(name) for name in failure.also] or None,
        "next": failure.next_step,
        "report": readable(failure.report()),
    }


def known_fields(failure: FailureFields) -> FailureFields:
    """Returns the fields with a value."""
    return cast(FailureFields, {key: value for key, value in failure.items() if value is not None})


def state(failure: FailureFields) -> str:
    """Returns the state in words."""
    return "not healed" if failure["state"] == "open" else str(failure["state"])


def clock(timestamp: float) -> str:
    """Returns the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(timestamp))


def rows(failure: FailureFields) -> list[tuple[str, str]]:
    """Returns the facts of a failure as (label, value) pairs."""
    lines = [("mesh", f"{failure['name']}, {failure['where']}"), ("host", hosts(failure))]
    lines.append(("ended", failure.get("ended_by") or ""))
    lines.append(("memory", failure.get("memory") or ""))
    lines.append(("at", clock(failure["at"])))
    lines.append(("affects", ", ".join(failure.get("also") or ())))
    lines += [(ranks, text) for ranks, text in failure.get("texts") or ()]
    return [(label, value) for label, value in lines if value]


def hosts(failure: FailureFields) -> str:
    """Returns the hosts and processes of a failure, such as "h1f2e3d, pids 4711, 4712"."""
    processes = failure.get("processes")
    if processes is None:
        pid = failure.get("pid")
        return ", ".join(filter(None, (failure.get("host") or "", f"pid {pid}" if pid else "")))
    parts = []
    for host, pids in processes:
        more = f" and {len(pids) - _PIDS} more" if len(pids) > _PIDS else ""
        shown = ", ".join(map(str, pids[:_PIDS]))
        parts.append(f"{host}, pid{'s'[: len(pids) > 1]} {shown}{more}" if pids else host)
    return "; ".join(parts)


def tails(failure: FailureFields) -> list[tuple[str, list[str]]]:
    """Returns last lines of output as (ranks, lines), with equal lines merged; "" stands for all ranks."""
    several = failure.get("lines")
    if several:
        return [(ranks, list(lines)) for ranks, lines in several]
    last = failure.get("last_lines")
    return [("", list(last))] if last else []


def text(failure: FailureFields, paint: Paint = plain, *, brief: str = "") -> str:
    """Returns the whole description as lines; with `brief`, the place where it was shown before, only the next step."""

    def line(label: str, value: str, style: str = "plain") -> str:
        return f"  {paint(label.ljust(9), 'dim')} {paint(value, style)}"

    if brief:
        return "\n".join([line("more", brief), line("next", failure["next"], "strong")])
    trace = failure.get("traceback") or ""
    lines = [f"  {row}" for row in trace.splitlines()] + [""] * bool(trace)
    lines += [line(label, value) for label, value in rows(failure)]
    last_lines = tails(failure)
    for ranks, last in last_lines:
        whose = "its last lines" if len(failure.get("ranks", ())) < 2 else "the last lines of each"
        lines.append(paint(f"  the last lines of {ranks}:" if ranks else f"  {whose}:", "dim"))
        lines += [f"    | {row.rstrip()}" for row in last[-max(3, _LINES // len(last_lines)) :]]
    dump = failure.get("dump")
    if dump:
        lines += [paint("  it crashed here:", "dim"), *(f"    | {row.rstrip()}" for row in dump)]
    lines.append(line("next", failure["next"], "strong"))
    return "\n".join(lines)
