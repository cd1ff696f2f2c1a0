"""Stacks of this process for profiles: from the endpoint inwards, without the library's frames."""

import os
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from enum import IntEnum

from monarch_nb.profiling.verbs import StackFrame
from monarch_nb.runtime import ActorCell
from monarch_nb.wire import ENGINE, is_users_file

Step = tuple[int, int]  # number of a frame's code, and its current instruction
Stack = tuple[Step, ...]  # outermost first

_RUNS_ACTORS = os.path.join(ENGINE, "runtime", "actors", "cell.py")
_OWN_PREFIX = "monarch-"  # of the names of the library's threads
_STARTS = frozenset({"_bootstrap", "_bootstrap_inner", "run"})  # functions of threading.py in which threads begin


class _Kind(IntEnum):
    OTHER = 0
    ENGINE = 1
    RUNS_ACTORS = 2  # of the engine; the frames below are an actor's
    STARTS = 3  # how a thread begins


class Stacks:
    """Reads the stacks of this process. Frames are numbers here, which makes samples cheap; `frame` describes them."""

    def __init__(self) -> None:
        # By identity: code objects compare by content, so that those of two files may be equal.
        self._codes: dict[int, types.CodeType] = {}
        self._kinds: dict[int, _Kind] = {}

    def samples(self, cells: Iterable[ActorCell], *, threads: bool) -> Iterator[tuple[str, int, Stack]]:
        """Yields the actors, and with `threads` other threads of the process: a name, the thread's native number, the
        stack. The stack of an actor that waits for messages is empty. The library's own threads are left out.
        """
        frames = sys._current_frames()
        idents = set()
        for cell in cells:
            thread = cell.executor.thread
            idents.add(thread.ident)
            yield cell.spec.name, thread.native_id or 0, self._of_actor(cell, frames.get(thread.ident or 0))
        if not threads:
            return
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread.ident in idents or thread.name.startswith(_OWN_PREFIX):
                continue
            stack = self._walk(frame)
            first = next(
                (index for index, (code, _) in enumerate(stack) if self._kinds[code] is not _Kind.STARTS), len(stack)
            )
            if first < len(stack) and self._kinds[stack[first][0]] is _Kind.OTHER:
                yield thread.name, thread.native_id or 0, tuple(stack[first:])

    def _of_actor(self, cell: ActorCell, frame: types.FrameType | None) -> Stack:
        stack = self._user_part(self._walk(frame))
        if not stack and cell.running is not None:
            stack = self._user_part(self._suspended(cell))
        return tuple(stack)

    def _walk(self, frame: types.FrameType | None) -> list[Step]:
        stack = []
        while frame is not None:
            stack.append(self._step(frame))
            frame = frame.f_back
        return stack[::-1]

    def _step(self, frame: types.FrameType) -> Step:
        code = frame.f_code
        number = id(code)
        if number not in self._codes:
            self._codes[number] = code
            self._kinds[number] = _kind(code)
        return number, frame.f_lasti

    def _suspended(self, cell: ActorCell) -> list[Step]:
        """Returns the stack of a suspended async actor: its endpoint's coroutine, and the coroutines that it awaits."""
        task = cell.task
        waiting = task.get_coro() if task is not None and not task.done() else None
        stack: list[Step] = []
        while waiting is not None:
            frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
            if frame is None:
                break
            stack.append(self._step(frame))
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
        return stack

    def _user_part(self, stack: list[Step]) -> list[Step]:
        """Returns the user's part of a stack: below the library's frames, to the first call back into the library."""
        kinds = [self._kinds[code] for code, _ in stack]
        runs = [index for index, kind in enumerate(kinds) if kind is _Kind.RUNS_ACTORS]
        first = runs[-1] + 1 if runs else len(kinds)
        while first < len(kinds) and kinds[first] is _Kind.ENGINE:
            first += 1
        last = next((index + 1 for index in range(first, len(kinds)) if kinds[index] is _Kind.ENGINE), len(kinds))
        return stack[first:last]

    def frame(self, step: Step) -> StackFrame:
        """Describes a frame."""
        code, instruction = self._codes[step[0]], step[1]
        file = code.co_filename
        return StackFrame(file, _line(code, instruction), code.co_qualname, code.co_firstlineno, is_users_file(file))


def _kind(code: types.CodeType) -> _Kind:
    file = code.co_filename
    if file == _RUNS_ACTORS:
        return _Kind.RUNS_ACTORS
    if file.startswith(ENGINE):
        return _Kind.ENGINE
    return _Kind.STARTS if file == threading.__file__ and code.co_name in _STARTS else _Kind.OTHER


def _line(code: types.CodeType, instruction: int) -> int:
    first = code.co_firstlineno
    for begin, end, line in code.co_lines():
        if begin <= instruction < end:
            return line or first
    return first
