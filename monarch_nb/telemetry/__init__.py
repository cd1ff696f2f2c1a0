"""What a program tells of itself while it runs: spans and measurements, on OpenTelemetry's API."""

from monarch_nb.telemetry.meters import Meter, get_meter
from monarch_nb.telemetry.traced import span, traced

__all__ = ["Meter", "get_meter", "span", "traced"]
