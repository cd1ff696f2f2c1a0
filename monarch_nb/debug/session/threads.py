"""Where each thread of a process is: its stack, and what it does there."""

import sys
import threading
import time
from collections.abc import Iterable

from monarch_nb.debug.records import Thread
from monarch_nb.debug.session import stack as stacks
from monarch_nb.runtime import ActorCell


def threads(cells: Iterable[ActorCell]) -> tuple[Thread, ...]:
    """The threads of this process, but for the engine's; `cells` are its actors."""
    frames = sys._current_frames()
    by_thread = {cell.executor.thread.ident: cell for cell in cells}
    seen = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        cell = by_thread.get(thread.ident)
        if frame is None or (cell is None and thread.name.startswith("monarch-")):
            continue
        stack = stacks.walk(frame)
        own = stacks.own_part(stack)
        running = cell.running if cell is not None else None
        if cell is not None and running is None and not own:
            stack = []  # it waits for messages
        seen.append(
            Thread(
                thread.name,
                stacks.frames(_without_wait(stack[own:])),
                cell.spec.name if cell is not None else "",
                cell.mesh if cell is not None else "",
                cell.rank if cell is not None else 0,
                running[1] if running is not None else "",
                time.monotonic() - running[2] if running is not None else 0.0,
            )
        )
    return tuple(seen)


def _without_wait(stack: list[stacks.Entry]) -> list[stacks.Entry]:
    """Without the engine's frames at its inner end: how `.get()` waits is of no interest."""
    end = len(stack)
    while end and stacks.is_engine(stack[end - 1][0]):
        end -= 1
    return stack[:end]
