"""A SIGINT at a chosen step of the main thread: any point in the library where Python may run a signal handler."""

import dis
import functools
import os
import signal
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import monarch_nb

_PACKAGE = os.path.dirname(monarch_nb.__file__) + os.sep
_CHECKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}  # after these a handler may run


class Step(NamedTuple):
    """One instruction, in one run of a program."""

    file: str
    function: str
    line: int
    offset: int


@functools.cache
def _offsets(code: CodeType) -> frozenset[int]:
    """Offsets before which a handler may run, in the same `except` or `with` as the check for it."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler_of(offset: int) -> Any:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    offsets = set()
    last: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if last is not None and last.opname in _CHECKS and handler_of(last.offset) == handler_of(instruction.offset):
            offsets.add(instruction.offset)
        if instruction.opname == "JUMP_BACKWARD" and isinstance(instruction.argval, int):
            offsets.add(instruction.argval)
        last = instruction
    return frozenset(offsets)


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
        return self._trace

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if event == "opcode" and frame.f_lasti in _offsets(code):
            step = Step(code.co_filename.removeprefix(_PACKAGE), code.co_name, frame.f_lineno or 0, frame.f_lasti)
            visit = self.seen[step] = self.seen.get(step, 0) + 1
            if step == self._step and visit == self._visit:
                self._step = None
                signal.raise_signal(signal.SIGINT)  # its handler runs in here, and raises where the step is
        return self._trace
