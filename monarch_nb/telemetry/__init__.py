"""Reports of a running program: values as curves, and spans and measurements through OpenTelemetry's API."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.telemetry.opentelemetry import Meter, get_meter, span, traced

if TYPE_CHECKING:
    from monarch_nb.telemetry.histories import History, history
    from monarch_nb.telemetry.points import Metrics, log

__all__ = ["History", "Meter", "Metrics", "get_meter", "history", "log", "span", "traced"]

__getattr__ = lazy_names(__name__, {"histories": ("History", "history"), "points": ("Metrics", "log")})
