"""`breakpoint()` and `pdb.set_trace()` in an actor stop that actor; elsewhere they work as usual."""

import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_nb._package import when_imported
from monarch_nb.runtime.context import current, started
from monarch_nb.runtime.features import DEBUG


def _patch_pdb(module: Any) -> None:
    before = module.set_trace
    if getattr(before, "_monarch", False):
        return

    def set_trace(*args: object, **kwargs: object) -> object:
        return _stop(sys._getframe(1), "pdb.set_trace()", before, args, kwargs)

    set_trace.__dict__.update(_monarch=True, monarch_before=before)
    module.set_trace = set_trace


def install_breakpoints() -> None:
    """Makes `breakpoint()` and `pdb.set_trace()` in an actor stop that actor; elsewhere they work as before."""
    before: Callable[..., object] = sys.breakpointhook
    if not getattr(before, "_monarch", False):

        def breakpointhook(*args: object, **kwargs: object) -> object:
            if os.environ.get("PYTHONBREAKPOINT") == "0":  # breakpoints are switched off, as everywhere in Python
                return None
            return _stop(sys._getframe(1), "breakpoint()", before, args, kwargs)

        breakpointhook.__dict__.update(_monarch=True)
        sys.breakpointhook = breakpointhook
    when_imported("pdb", _patch_pdb)


def _stop(
    frame: FrameType, reason: str, before: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    process = started()
    context = current.get()
    in_actor = context is not None and context.actor_instance.cell is not None
    if process is None or not (in_actor or process.is_worker):  # the notebook's own cells, or a script
        return _elsewhere(frame, before, args, kwargs)
    debugger = process.feature(DEBUG)
    debugger.stop(frame, reason)
    return None


def _elsewhere(
    frame: FrameType, before: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Handles a breakpoint outside of actors as the original function does, at the caller's frame, not at ours."""
    if before is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
        before = sys.modules["pdb"].set_trace if "pdb" in sys.modules else importlib.import_module("pdb").set_trace
        before = getattr(before, "monarch_before", before)
    code = getattr(before, "__code__", None)
    if code is not None and "frame" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return before(*args, **{"frame": frame, **kwargs})
    if getattr(before, "__module__", "") == "pdb":
        debugger = importlib.import_module("pdb").Pdb()
        if kwargs.get("header") is not None:
            debugger.message(kwargs["header"])
        return debugger.set_trace(frame)
    return before(*args, **kwargs)


def stop_here(frame: FrameType, reason: str) -> None:
    """Stops the calling thread at `frame` as `breakpoint()` would."""
    _stop(frame, reason, lambda: sys.breakpointhook(), (), {})


def breakpoint_if(condition: object, reason: str = "") -> None:
    """Stops the actor that calls it if `condition` is true; in a process without actors it is `breakpoint()`.

    Costs no more than the test where it is false.
    """
    if condition:
        stop_here(sys._getframe(1), reason or "breakpoint_if()")
