"""PyTorch's profiler on one rank, on the thread that runs its endpoints: the rank's part of `Traces`."""

import gzip
import inspect
import tempfile
from pathlib import Path
from typing import Any

_running: dict[int, Any] = {}


def begin(number: int, *, every_thread: bool = False) -> None:
    """Begins to trace this thread, or with `every_thread` all threads where PyTorch can (since 2.7).

    Raises RuntimeError where PyTorch is not installed.
    """
    try:
        from torch import profiler
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        raise RuntimeError("PyTorch is not installed there: pip install torch") from None
    options: dict[str, Any] = {}
    if every_thread and "profile_all_threads" in (inspect.getdoc(_ExperimentalConfig.__init__) or ""):
        options["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
    traced = profiler.profile(**options)
    traced.start()
    _running[number] = traced


def end(number: int) -> bytes:
    """Ends the trace and returns it, in Chrome's JSON, gzipped. Raises RuntimeError if none runs."""
    traced = _running.pop(number, None)
    if traced is None:
        raise RuntimeError("its process is a new one, in which no trace was begun")
    traced.stop()
    with tempfile.TemporaryDirectory(prefix="monarch-trace-") as folder:
        file = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(file))
        return gzip.compress(file.read_bytes(), 3)
