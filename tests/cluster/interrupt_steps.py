"""A SIGINT at a chosen step of the main thread: wherever in the library Python may run the handler of a signal."""

import dis
import functools
import os
import signal
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import monarch_nb

_PACKAGE = os.path.dirname(monarch_nb.__file__) + os.sep
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}  # after these a handler may run


class Step(NamedTuple):
    """One instruction, in one run of a program."""

    file: str
    function: str
    line: int
    offset: int


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Instructions before which a handler may run, inside the same `except` or `with` as where it is looked for."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def around(offset: int) -> Any:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    found = set()
    last: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if last is not None and last.opname in _LOOKS and around(last.offset) == around(instruction.offset):
            found.add(instruction.offset)
        if instruction.opname == "JUMP_BACKWARD" and isinstance(instruction.argval, int):
            found.add(instruction.argval)
        last = instruction
    return frozenset(found)


class Steps:
    """Follows the main thread through the library; at the `visit`th time at `step`, it is sent a SIGINT."""

    def __init__(self, step: Step | None = None, visit: int = 1) -> None:
        self.seen: dict[Step, int] = {}
        self._step, self._visit = step, visit

    def __enter__(self) -> "Steps":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if event == "opcode" and frame.f_lasti in _places(code):
            step = Step(code.co_filename.removeprefix(_PACKAGE), code.co_name, frame.f_lineno or 0, frame.f_lasti)
            visit = self.seen[step] = self.seen.get(step, 0) + 1
            if step == self._step and visit == self._visit:
                self._step = None
                signal.raise_signal(signal.SIGINT)  # its handler runs in here, and raises where the step is
        return self._look
