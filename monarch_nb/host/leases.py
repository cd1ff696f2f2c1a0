"""Leases of owners whose death this host cannot observe by itself. Pure; times are passed in."""


class Idleness:
    """Measures for how long this host was not used, without time in which it was frozen."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit  # seconds; None: no limit
        self._idle = 0.0
        self._checked_at: float | None = None

    @property
    def pace(self) -> float:
        """Seconds between checks."""
        return min(1.0, (self.limit or 4.0) / 4)

    def over(self, used: bool, now: float) -> bool:
        """Returns whether the limit is reached. To be called at the pace of `pace`."""
        elapsed = 0.0 if self._checked_at is None else min(now - self._checked_at, 2 * self.pace)
        self._checked_at = now
        self._idle = 0.0 if used else self._idle + elapsed
        return self.limit is not None and self._idle >= self.limit


class OwnerLeases:
    """Deadlines by owner address.

    Time in which this host did not check (it was frozen, or swapped out) does not count: the owners' signs of life of
    that time are still unread.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until: dict[str, float] = {}
        self._length: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._checked_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def pace(self) -> float:
        """Seconds between checks."""
        return min(1.0, self.seconds / 4)

    @property
    def owners(self) -> list[str]:
        """Returns the owners with a lease."""
        return list(self._until)

    def grant(self, owner: str, now: float, seconds: float | None = None) -> None:
        """Begins or renews a lease; `seconds` stays in force for later renewals."""
        if not self._until:
            self._checked_at = now
        length = self._length[owner] = seconds or self._length.get(owner, self.seconds)
        self._until[owner] = now + length

    def renew(self, owner: str, now: float) -> None:
        """Renews an owner's lease, if it has one, after a sign of life."""
        if owner in self._until:
            self._until[owner] = max(self._until[owner], now + self._length[owner])

    def end(self, owner: str) -> None:
        """Removes a lease."""
        self._until.pop(owner, None)
        self._length.pop(owner, None)
        self._asked_at.pop(owner, None)

    def due(self, now: float) -> list[str]:
        """Returns owners to be asked for a sign of life: each once in a quarter of its lease."""
        due = [owner for owner in self._until if now - self._asked_at.get(owner, 0.0) >= self._length[owner] / 4]
        self._asked_at = {owner: now if owner in due else self._asked_at[owner] for owner in self._until}
        return due

    def expired(self, now: float) -> list[str]:
        """Removes and returns owners whose lease has ended. To be called at the pace of `pace`."""
        elapsed, self._checked_at = now - self._checked_at, now
        if elapsed > 2 * self.pace:
            self._until = {owner: until + elapsed for owner, until in self._until.items()}
        expired = [owner for owner, until in self._until.items() if until <= now]
        for owner in expired:
            self.end(owner)
        return expired
