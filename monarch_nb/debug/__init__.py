"""The debugger of a cluster: what is stopped, commands to one rank, a slice, or all; failures that are kept; stacks.

`breakpoint()` in an actor stops it; breakpoints are also set from outside, `set_breakpoint("train.py:42", trainers)`.
Everything that the prompt and the magics do is here: `group().eval("loss")`, `.step()`, `.resume()`.
"""

from monarch_nb.debug.api import (
    Group,
    breakpoints,
    clear_breakpoint,
    detach,
    eval,  # noqa: A004
    freeze_on_error,
    group,
    next,  # noqa: A004
    on_change,
    post_mortem,
    release,
    resume,
    sessions,
    set_breakpoint,
    stacks,
    step,
    table,
    take,
    wait,
    where,
)
from monarch_nb.debug.control.controller import Breakpoint
from monarch_nb.debug.records import DebugError, Frame, QuitDebugger, Stopped, StoppedAtBreakpoint, Tensor, Value
from monarch_nb.debug.render.merge import Answers
from monarch_nb.debug.service import controller
from monarch_nb.runtime import breakpoint_if

__all__ = [
    "Answers",
    "Breakpoint",
    "DebugError",
    "Frame",
    "Group",
    "QuitDebugger",
    "Stopped",
    "StoppedAtBreakpoint",
    "Tensor",
    "Value",
    "breakpoint_if",
    "breakpoints",
    "clear_breakpoint",
    "controller",
    "detach",
    "eval",
    "freeze_on_error",
    "group",
    "next",
    "on_change",
    "post_mortem",
    "release",
    "resume",
    "sessions",
    "set_breakpoint",
    "stacks",
    "step",
    "table",
    "take",
    "wait",
    "where",
]
