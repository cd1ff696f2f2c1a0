"""What a program reports while it runs: values as curves, and spans and measurements on OpenTelemetry's API."""

from monarch_nb.telemetry.meters import Meter, get_meter
from monarch_nb.telemetry.metrics import Metrics
from monarch_nb.telemetry.points import log
from monarch_nb.telemetry.traced import span, traced

__all__ = ["Meter", "Metrics", "get_meter", "log", "span", "traced"]
