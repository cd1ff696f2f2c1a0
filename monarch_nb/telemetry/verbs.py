"""Engine messages with the values that actors report."""

import msgspec

from monarch_nb.wire import Done, Lane, Verb


class MetricPoint(msgspec.Struct, array_like=True, frozen=True):
    """A value. `step` is None if the program has passed none."""

    mesh: str
    rank: int  # base rank
    name: str
    step: float | None
    at: float  # wall clock
    value: float


class MetricPoints(msgspec.Struct, array_like=True, frozen=True):
    """Values; those of one name and rank are in the order of their reports."""

    points: list[MetricPoint]


REPORT = Verb("metrics.report", MetricPoints, doc="values that actors reported", lane=Lane.DATA)
TAKE = Verb("metrics.take", Done, MetricPoints, doc="values that wait to be sent are wanted now", lane=Lane.DATA)
