"""The engine message that carries the values which actors tell of their work."""

import msgspec

from monarch_nb.telemetry.series import Point
from monarch_nb.wire import Done, Lane, Verb


class MetricPoints(msgspec.Struct, array_like=True, frozen=True):
    """Values, in the order in which they were told."""

    points: list[Point]


TOLD = Verb("metrics.told", MetricPoints, doc="values that actors reported", lane=Lane.DATA)
TAKE = Verb("metrics.take", Done, MetricPoints, doc="values that wait to be sent are wanted now", lane=Lane.DATA)
