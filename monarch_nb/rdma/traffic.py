"""What has moved between processes: by whom, by which mover, how much and how fast. Tables without I/O."""

from collections.abc import Iterable

import msgspec

__all__ = ["Flow", "Offered", "Report", "Traffic"]

_FAR = 3.0  # seconds after which a rate is of the past


class Flow(msgspec.Struct, array_like=True):
    """Bytes that one process has from another, by one mover, since both began."""

    source: str  # the address of the process whose memory they come from
    target: str
    mover: str
    size: int = 0  # bytes
    transfers: int = 0
    seconds: float = 0.0  # spent in them, by the side that asked for them

    @property
    def key(self) -> tuple[str, str, str]:
        """From where to where, and by what."""
        return self.source, self.target, self.mover


class Offered(msgspec.Struct, array_like=True, frozen=True):
    """Memory that a process offers to others at the moment."""

    regions: int
    size: int  # bytes


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What one process tells of itself: all flows that it has asked for and that have changed, and what it offers."""

    process: str
    flows: list[Flow]
    offered: Offered
    at: float  # seconds since the epoch


class Traffic:
    """What is known of all processes: flows with the rate at which they run now."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str, str], Flow] = {}
        self.offered: dict[str, Offered] = {}
        self._rates: dict[tuple[str, str, str], tuple[float, float]] = {}  # bytes per second, and when

    def add(self, report: Report) -> None:
        """Takes in what a process tells."""
        for flow in report.flows:
            before = self.flows.get(flow.key)
            self.flows[flow.key] = flow
            seconds = flow.seconds - (before.seconds if before is not None else 0.0)
            moved = flow.size - (before.size if before is not None else 0)
            if moved > 0 and seconds > 0:
                self._rates[flow.key] = (moved / seconds, report.at)
        if report.offered.regions:
            self.offered[report.process] = report.offered
        else:
            self.offered.pop(report.process, None)

    def rate(self, flow: Flow, now: float) -> float:
        """Bytes per second while it last moved something; 0 where that is a while ago."""
        rate, at = self._rates.get(flow.key, (0.0, 0.0))
        return rate if now - at < _FAR else 0.0

    def forget(self, processes: Iterable[str]) -> None:
        """Processes that have ended: nothing is told of them any more."""
        gone = set(processes)
        for key in [key for key in self.flows if gone & set(key[:2])]:
            del self.flows[key]
            self._rates.pop(key, None)
        for process in gone:
            self.offered.pop(process, None)
