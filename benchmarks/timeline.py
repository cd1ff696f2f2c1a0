"""Where the time of one call goes: `python -m benchmarks.timeline` draws it, as a median of many calls.

Both processes note the clock, which they share, as a call passes through them; the notes themselves cost about 10 %.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, endpoint, this_host

CALLS = 4000
WIDTH = 60
_notes: list[tuple[str, int]] = []

# The actor, its work, and the notes between which it lasts.
STEPS = (
    ("caller", "the call is put together", "begin", "write"),
    ("caller", "into the kernel", "write", "written"),
    ("kernel", "wakes the worker's reader", "written", "worker reads"),
    ("worker reader", "from the kernel to the actor's queue", "worker reads", "queued"),
    ("kernel", "wakes the actor's thread", "queued", "actor runs"),
    ("actor", "arguments, the endpoint, its result", "actor runs", "reply write"),
    ("actor", "into the kernel", "reply write", "reply written"),
    ("kernel", "wakes the caller's reader", "reply written", "caller reads"),
    ("caller's reader", "from the kernel to the future", "caller reads", "answered"),
    ("kernel", "wakes the caller", "answered", "caller wakes"),
    ("caller", "the result is unpacked", "caller wakes", "end"),
)


def note(owner: Any, name: str, before: str, after: str = "") -> None:
    """Notes the time when a method is entered, and left."""
    plain: Callable[..., Any] = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        if before:
            _notes.append((before, time.monotonic_ns()))
        try:
            return plain(*args, **kwargs)
        finally:
            if after:
                _notes.append((after, time.monotonic_ns()))

    setattr(owner, name, noting)


class Noter(Actor):
    """Notes what passes through its process."""

    def __init__(self) -> None:
        stream = importlib.import_module("monarch_nb.transport.streams").Stream
        note(stream, "_read", "worker reads")
        note(stream, "push", "reply write", "reply written")
        note(importlib.import_module("monarch_nb.runtime.actors.executors").SyncExecutor, "put", "", "queued")
        note(importlib.import_module("monarch_nb.runtime.actors.cell").ActorCell, "run_sync", "actor runs")

    @endpoint
    def noop(self) -> None:
        return None

    @endpoint
    def notes(self) -> list[tuple[str, int]]:
        result = list(_notes)
        _notes.clear()
        return result


def measured() -> dict[str, float]:
    """Microseconds from the beginning of a call to each note, as medians."""
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    worker = procs.spawn("noter", Noter).slice(gpus=0)
    worker.noop.call_one().get()
    stream = importlib.import_module("monarch_nb.transport.streams").Stream
    future = importlib.import_module("monarch_nb.runtime.future").Future
    note(stream, "push", "write", "written")
    note(stream, "_read", "caller reads")
    note(future, "_finish", "", "answered")
    note(future, "_wait", "", "caller wakes")
    durations: dict[str, list[float]] = {}
    for number in range(CALLS):
        _notes.clear()
        begin = time.monotonic_ns()
        worker.noop.call_one().get()
        own = [("begin", begin), *_notes, ("end", time.monotonic_ns())]
        notes = worker.notes.call_one().get()
        if number < CALLS // 10:
            continue
        first: dict[str, int] = {}
        for name, instant in sorted([*own, *notes], key=lambda entry: entry[1]):
            if instant >= begin:
                first.setdefault(name, instant)
        for name, instant in first.items():
            durations.setdefault(name, []).append((instant - begin) / 1000)
    procs.stop().get()
    return {name: statistics.median(times) for name, times in durations.items()}


def drawn(times: dict[str, float]) -> str:
    """The steps as bars below each other."""
    scale = WIDTH / times["end"]
    lines = [f"{'who':16} {'does what':38} {'µs':>5}"]
    for actor, action, start, stop in STEPS:
        left, length = round(times[start] * scale), max(1, round((times[stop] - times[start]) * scale))
        bar = " " * left + ("·" if actor == "kernel" else "█") * length
        lines.append(f"{actor:16} {action:38} {times[stop] - times[start]:5.1f} {bar}")
    lines.append(f"{'':16} {'in all':38} {times['end']:5.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawn(measured()))
