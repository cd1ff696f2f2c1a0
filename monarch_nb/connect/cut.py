"""What the looks at a host whose connection was cut amount to."""

REFUSED_S = 5.0  # a machine that answers, but at whose port nobody listens any more for that long, lost its agent


class Cut:
    """One cut, since `now`. Times are those of a monotonic clock, in seconds; no I/O."""

    def __init__(self, now: float, lease: float) -> None:
        self._lease = lease
        self._heard_at = now
        self._refused_at: float | None = None

    def silent(self, now: float, vouched: bool) -> bool:
        """Whether the lease is over: `vouched` says that something of that machine answers now."""
        if vouched:
            self._heard_at = now
        return now - self._heard_at >= self._lease

    def refused(self, now: float, listens: bool | None) -> bool:
        """Whether its agent has ended, as nobody listens there any more; None where that cannot be seen from here."""
        if listens is not False:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now
        return self._refused_at is not None and now - self._refused_at >= min(REFUSED_S, self._lease)
