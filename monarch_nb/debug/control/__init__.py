"""The controller's side of the debugger: stopped threads, and commands to them."""

from monarch_nb.debug.control.controller import STEP_S, Breakpoint, Breakpoints, Controller
from monarch_nb.debug.control.stopped_threads import StoppedThreads
from monarch_nb.debug.control.whereabouts import inspect_stacks, missing, running_text, stacks_text

__all__ = [
    "STEP_S",
    "Breakpoint",
    "Breakpoints",
    "Controller",
    "StoppedThreads",
    "inspect_stacks",
    "missing",
    "running_text",
    "stacks_text",
]
