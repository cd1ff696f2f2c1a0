"""Tables of transfers between processes: by which mover, how much, how fast. No I/O."""

from collections.abc import Iterable

import msgspec

_OUTDATED_S = 3.0  # seconds after which a rate is outdated


class Flow(msgspec.Struct, array_like=True):
    """Bytes moved from one process to another by one mover, in total."""

    source: str  # address of the process whose memory is read
    target: str
    mover: str
    size: int = 0  # bytes
    transfers: int = 0
    seconds: float = 0.0  # spent in transfers, measured by the side that requested them

    @property
    def key(self) -> tuple[str, str, str]:
        """Source, target and mover."""
        return self.source, self.target, self.mover


class Offered(msgspec.Struct, array_like=True, frozen=True):
    """Memory that a process offers now."""

    regions: int
    size: int  # bytes


class TrafficReport(msgspec.Struct, array_like=True, frozen=True):
    """Report of one process: its flows that have changed, and the memory that it offers."""

    process: str
    flows: list[Flow]
    offered: Offered
    at: float  # seconds since the epoch


class Traffic:
    """Flows of all processes, with their current rates."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str, str], Flow] = {}
        self.offered: dict[str, Offered] = {}
        self._rates: dict[tuple[str, str, str], tuple[float, float]] = {}  # bytes per second, and when

    def add(self, report: TrafficReport) -> None:
        """Adds the report of a process."""
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
        """Bytes per second of the latest transfers; 0 if they are outdated."""
        rate, at = self._rates.get(flow.key, (0.0, 0.0))
        return rate if now - at < _OUTDATED_S else 0.0

    def forget(self, processes: Iterable[str]) -> None:
        """Removes processes that have ended."""
        ended = set(processes)
        for key in [key for key in self.flows if ended & set(key[:2])]:
            del self.flows[key]
            self._rates.pop(key, None)
        for process in ended:
            self.offered.pop(process, None)
