"""What a program reports while it runs: values as curves, and spans and measurements on OpenTelemetry's API."""

import importlib
from typing import TYPE_CHECKING, Any

from monarch_nb.telemetry.meters import Meter, get_meter
from monarch_nb.telemetry.traced import span, traced

if TYPE_CHECKING:
    from monarch_nb.telemetry.metrics import Metrics
    from monarch_nb.telemetry.points import log

__all__ = ["Meter", "Metrics", "get_meter", "log", "span", "traced"]

# Loaded when they are first used.
_HOMES = {"Metrics": "metrics", "log": "points"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
