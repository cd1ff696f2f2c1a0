"""What an actor runs, and where that is, for those who look from other threads."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell

MOST_QUEUED = 64


class ActorRun(NamedTuple):
    """An endpoint under way, or `__init__`."""

    call: str
    endpoint: str
    since: float  # monotonic
    task: "asyncio.Task[object] | None" = None  # of an async endpoint


def runs_of(cell: "ActorCell") -> list[ActorRun]:
    """Returns what an actor runs: of concurrent endpoints several, the newest first."""
    if (constructed := cell.constructing) is not None:
        return [ActorRun(*constructed)]
    runs = {run[0]: ActorRun(*run, task) for task, run in tuple(cell.async_runs.values())}
    if (running := cell.running) is not None:
        runs.setdefault(running[0], ActorRun(*running))
    return sorted(runs.values(), key=lambda run: -run.since)


def queued_calls(cell: "ActorCell") -> tuple[str, ...]:
    """Returns the first calls that wait for an answer behind what an actor runs."""
    return tuple(islice((header.call for header, _ in cell.queued() if header.port), MOST_QUEUED))


def frames_of(run: ActorRun, innermost: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a run, innermost first; `innermost` is that of its actor's thread."""
    suspended = suspended_frames(run.task)
    yield from reversed(suspended)
    frame = None if suspended else innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def suspended_frames(task: "asyncio.Task[object] | None") -> list[FrameType]:
    """Returns the frames of a suspended task, outermost first: its coroutine's, and those that it awaits."""
    waiting = task.get_coro() if task is not None and not task.done() else None
    frames: list[FrameType] = []
    while waiting is not None and not getattr(waiting, "cr_running", False):
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return frames
