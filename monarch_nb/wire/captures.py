"""A look at what functions take along: a big global travels with every message that its function is in."""

import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from monarch_nb.settings import settings

_ENGINE = (str(Path(__file__).parent.parent), str(Path(cloudpickle.__file__).parent))
_SMALL = (type(None), bool, int, float, types.FunctionType, types.ModuleType, type)


def warn_of_big_captures(function: types.FunctionType, captured: Mapping[str, Any]) -> None:
    """Warn, naming variable and function, of each of the `captured` globals that is large."""
    for name, value in captured.items():
        if isinstance(value, _SMALL):
            continue
        size = _weight(value, depth=2)
        if size > settings.capture_warning_size:
            warnings.warn(
                f"the function `{function.__qualname__}` captures the global `{name}` ({size / 1e6:.0f} MB), which "
                "travels with every message that the function is in: pass it as an argument, or put it on the "
                "actors once",
                stacklevel=_distance_to_user(),
            )


def _weight(value: Any, depth: int) -> int:
    """About how many bytes `value` takes in a pickle; looks at a bounded number of members."""
    if isinstance(value, (bytes, bytearray, str, memoryview)):
        return len(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        count = len(value)
        if not depth or not count:
            return 8 * count
        members = value.values() if isinstance(value, dict) else value
        sample = [_weight(member, depth - 1) for member, _ in zip(members, range(1000), strict=False)]
        return 8 * count + sum(sample) * count // len(sample)
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(value, module):
        return sum(int(parameter.nbytes) for parameter in value.parameters())
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch", "pandas", "array", "pyarrow", "polars"):
        return 0  # attributes of other types may compute anything
    try:
        if hasattr(value, "nbytes"):
            return int(value.nbytes)
        if hasattr(value, "memory_usage"):
            usage = value.memory_usage()
            return int(usage if isinstance(usage, int) else usage.sum())
        if hasattr(value, "estimated_size"):
            return int(value.estimated_size())
    except Exception:  # an estimate is not worth an error
        pass
    return 0


def _distance_to_user() -> int:
    """How many frames above the caller of the caller the first one of a user's is, for `warnings.warn`."""
    frame, distance = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ENGINE):
        frame, distance = frame.f_back, distance + 1
    return distance
