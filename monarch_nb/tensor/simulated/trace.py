"""A timeline as a trace that Perfetto and chrome://tracing open."""

from typing import TypeAlias

from monarch_nb.tensor.origin import CallSite, origin_of
from monarch_nb.tensor.simulated.timeline import SimulatedTimeline, groups, lane_name, ranks_named

Event: TypeAlias = dict[str, object]
_CONTROLLER = 1  # its number as a process


def events(timeline: SimulatedTimeline, shown: str, *, grouped: bool) -> list[Event]:
    """The events of a trace. `shown` is a trace mode: "stream_only", "controller_trace_only" or "everything"."""
    entries: list[Event] = []
    if shown != "stream_only":
        entries += _name_events("process", _CONTROLLER, 0, "Controller")
        entries += _name_events("thread", _CONTROLLER, _CONTROLLER, "Controller")
        for name, when, command, site in timeline.issued:
            entries.append(_event(name, "issued", when, 0, _CONTROLLER, _CONTROLLER, command, site))
    if shown == "controller_trace_only":
        return entries
    number = _CONTROLLER
    for ranks in groups(timeline) if grouped else [[rank] for rank in sorted(timeline.tasks)]:
        number += 1
        process, first = number, ranks[0]
        entries += _name_events("process", process, 0, ranks_named(ranks))
        for lane, tasks in timeline.tasks[first].items():
            number += 1
            entries += _name_events("thread", process, number, lane_name(lane))
            for task in tasks:
                if task.end > task.start:
                    entries.append(
                        _event(
                            task.name,
                            task.kind,
                            task.start,
                            task.end - task.start,
                            process,
                            number,
                            task.command,
                            task.site,
                        )
                    )
        for when, nbytes in timeline.memory_of(first):
            entries.append(
                {"name": "memory", "cat": "memory", "ph": "C", "ts": when, "pid": process, "args": {"bytes": nbytes}}
            )
    return entries


def _name_events(kind: str, process: int, thread: int, name: str) -> list[Event]:
    return [{"name": f"{kind}_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}]


def _event(
    name: str, kind: str, start: float, duration: float, process: int, thread: int, command: int, site: CallSite | None
) -> Event:
    details = {"command": command, "line": str(origin_of(site)) if site else ""}
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": process,
        "tid": thread,
        "args": details,
    }
