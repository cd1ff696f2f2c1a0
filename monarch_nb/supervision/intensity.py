"""How often the same rank may be healed in a while."""

from collections import deque
from collections.abc import Collection


class Intensity:
    """At most `limit` restarts of one rank of one mesh in `window` seconds."""

    def __init__(self, limit: int = 3, window: float = 60.0) -> None:
        self.limit = limit
        self.window = window
        self._restarts: dict[str, dict[int, deque[float]]] = {}

    def wait(self, mesh_uid: str, rank: int, now: float) -> float | None:
        """Seconds until the rank may be healed; None is at once."""
        times = self._restarts.get(mesh_uid, {}).get(rank)
        recent = [time for time in times or () if time > now - self.window]
        if len(recent) < self.limit:
            return None
        return recent[-self.limit] + self.window - now if self.limit > 0 else self.window

    def count(self, mesh_uid: str, rank: int, now: float) -> None:
        """A restart of the rank begins."""
        times = self._restarts.setdefault(mesh_uid, {}).setdefault(rank, deque(maxlen=max(self.limit, 1)))
        times.append(now)

    def forget(self, mesh_uid: str, ranks: Collection[int] | None = None) -> None:
        """The mesh is gone, or some of its ranks are new."""
        if ranks is None:
            self._restarts.pop(mesh_uid, None)
            return
        times = self._restarts.get(mesh_uid, {})
        for rank in ranks:
            times.pop(rank, None)
