"""Texts of failures."""

import signal
from collections.abc import Sequence
from datetime import datetime
from textwrap import indent

from monarch_nb.runtime import Cause
from monarch_nb.wire import host_name

NO_REASON = "no reason provided"
PROCS_STOPPED = "actor mesh is stopped due to proc mesh shutdown"
UNHANDLED = "failed because it did not handle a supervision event from its child"
RAISED_WHILE_HANDLING = "This error occurred while handling another failure:"

_SHOWN_LINES = 20
_NAMED = 4  # hosts


def ending(cause: Cause) -> str:
    """Describes the end of a process, such as "Killed(sig=9)"."""
    if cause.signal is not None:
        return f"Killed(sig={cause.signal})" + (", out of memory" if cause.oom else "")
    if cause.exitcode is not None:
        return f"Exited(code={cause.exitcode})"
    return cause.text or "for an unknown reason"


def notice_text(hosts: Sequence[str], by: str, seconds: float | None) -> str:
    """Returns the text of a preemption notice: its hosts, its source, and the remaining time."""
    when = "soon; nobody knows when" if seconds is None else f"in {seconds:.0f} s"
    return f"{hosts_text(hosts)} {'is' if len(hosts) == 1 else 'are'} about to be taken away ({by}), {when}"


def hosts_text(hosts: Sequence[str]) -> str:
    """Returns hosts by their names, the first few of many."""
    if len(hosts) == 1:
        return f"Host {host_name(hosts[0])}"
    more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
    return f"{len(hosts)} hosts ({', '.join(map(host_name, hosts[:_NAMED]))}{more})"


def error_text(cause: Cause) -> str:
    """Returns the text of a cause without the name of the actor; the cause behind it follows, indented."""
    text = cause.traceback.rstrip() or cause.text or NO_REASON
    match cause.kind:
        case "exit" | "signal":
            by_agent = f", by its host agent: {cause.text}" if cause.evicted and cause.text else ""
            return f"the process this actor was running on failed: {ending(cause)}{by_agent}"
        case "killed":
            return f"the process this actor was running on was killed: {text}"
        case "host":
            lost = f"the host {host_name(cause.host) or 'it was on'} was lost"
            if ", " in cause.host:
                lost = f"{hosts_text(cause.host.split(', '))} were lost"
            return lost + (f": {cause.text}" if cause.text else "")
        case "preemption":
            return f"its host {host_name(cause.host)} is about to be taken away: {cause.text}"
        case "init":
            return f"its __init__ raised:\n{text}"
        case "spawn":
            return f"it could not be started again: {text}"
        case "unhandled":
            return f"actor {cause.actor} {UNHANDLED}. The child's event was:\n{_chain_text(cause)}"
        case "raised":
            return f"{text}\n{RAISED_WHILE_HANDLING}\n{_chain_text(cause)}"
        case _:
            return text


def event_text(cause: Cause) -> str:
    """Returns the text of the whole event: the failed actor or process, and the cause."""
    if cause.kind == "unhandled":
        return f"Supervision event: {error_text(cause)}"
    return f"Supervision event: actor {cause.actor} failed:\n{indent(error_text(cause), '  ')}"


def unhandled(cause: Cause) -> tuple[Cause, list[str]]:
    """Returns the first cause, and a line for each owner that failed because it did not handle it, nearest first."""
    lines: list[str] = []
    while cause.kind == "unhandled" and cause.chain is not None:
        lines.insert(0, f"actor {cause.actor} {UNHANDLED}.")
        cause = cause.chain
    return cause, lines


def _chain_text(cause: Cause) -> str:
    return indent(event_text(cause.chain), "  ") if cause.chain else "  (not known)"


def facts(cause: Cause) -> list[tuple[str, str]]:
    """Returns host, process and kind of the end as (label, value) pairs; only known facts."""
    lines: list[tuple[str, str]] = []
    if cause.host or cause.pid:
        several = ", " in cause.host
        hosts = hosts_text(cause.host.split(", ")) if several else host_name(cause.host)
        lines.append(("host", ", ".join(filter(None, (hosts, f"pid {cause.pid}" if cause.pid else "")))))
    if cause.signal is not None:
        lines.append(("ended", f"by signal {cause.signal}{_signal_name(cause.signal)}"))
        if cause.oom:
            used = f"; it used {cause.memory}" if cause.memory else ""
            lines.append(("memory", f"the host killed it because it ran out of memory{used}"))
    elif cause.exitcode is not None:
        lines.append(("ended", f"with exit status {cause.exitcode}"))
    if cause.at:
        lines.append(("at", datetime.fromtimestamp(cause.at).astimezone().strftime("%H:%M:%S")))
    return lines


def last_lines_text(lines: tuple[str, ...]) -> str:
    """Returns the text of its last lines of output; "" without any."""
    shown = [f"    | {line.rstrip()}" for line in lines[-_SHOWN_LINES:]]
    return "\n".join(["  its last lines:", *shown]) if shown else ""


def dump_text(lines: tuple[str, ...]) -> str:
    """Returns the stacks of the process at its crash; "" if not known."""
    return "\n".join(["  it crashed here:", *(f"    | {line.rstrip()}" for line in lines)]) if lines else ""


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
