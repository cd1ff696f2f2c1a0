"""Where an actor is right now, as text."""

import linecache
import os
import sys
import threading
import time
import traceback
from typing import Any

from monarch_nb.runtime import EXEC, HOOK, RELOAD

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NAMES = {EXEC: "cell", HOOK: "healed", RELOAD: "reload"}


def stack_text(cell: Any) -> str:
    """The frames of an actor, outermost first; the engine's own frames are left out."""
    running = cell.running
    name = f"{cell.spec.name} ({cell.spec.class_name.rpartition('.')[2]})"
    if running is None:
        return f"{name}: waits for messages"
    lines = [f"{name}: {endpoint_name(running[1].lstrip('@!'))}, for {time.monotonic() - running[2]:.1f} s"]
    task = cell.task
    if task is not None and not task.done():
        frames: list[Any] = [(frame, frame.f_lineno) for frame in task.get_stack()]
    else:
        top = sys._current_frames().get(cell.executor.thread.ident)
        frames = [] if top is None else list(traceback.walk_stack(top))[::-1]
    shown = [(frame, line) for frame, line in frames if not frame.f_code.co_filename.startswith(_PACKAGE)]
    while shown and shown[0][0].f_code.co_filename == threading.__file__:
        shown.pop(0)
    for frame, line in shown:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}')
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        if text:
            lines.append(f"    {text}")
    return "\n".join(lines)


def endpoint_name(endpoint: str) -> str:
    """An endpoint as people know it: cells, hooks and reloads go under names of their own."""
    return _NAMES.get(endpoint, endpoint)
