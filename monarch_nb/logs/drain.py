"""Waiting for what was written before a reply: until it is there, or nothing more of it comes."""

from collections.abc import Mapping

from monarch_nb.logs.arrived import ArrivedLog


class Drain:
    """Knows how long to wait for some positions. Times are monotonic.

    It lasts while something of what is missing comes within each `silence` seconds, and no longer than `limit`.
    Processes whose output is not followed are not waited for.
    """

    def __init__(self, positions: Mapping[str, int], now: float, *, silence: float, limit: float) -> None:
        self._positions = positions
        self._silence = silence
        self._end = now + limit
        self._progress: dict[str, tuple[int, int]] = {}
        self._progress_at = now

    def patience(self, logs: Mapping[str, ArrivedLog], now: float) -> float | None:
        """Seconds to wait for more at most: 0 when it is given up, None when all of it is there."""
        behind = {
            address: logs[address].progress
            for address, position in self._positions.items()
            if address in logs and not logs[address].reached(position)
        }
        if not behind:
            return None
        if behind != self._progress:
            self._progress, self._progress_at = behind, now
        return max(0.0, min(self._progress_at + self._silence, self._end) - now)
