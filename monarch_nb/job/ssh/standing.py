"""How an SSH connection has stood, look by look: when the next attempt is due, and what there is to say of it."""

_FIRST_S, _LAST_S = 0.5, 3.0  # between attempts to have it again


class Standing:
    """Of one connection. Times are those of a monotonic clock, in seconds; no I/O."""

    def __init__(self) -> None:
        self._cut_at: float | None = None
        self._cut_by = ""
        self._failure = ""
        self._pause = _FIRST_S

    @property
    def cut(self) -> bool:
        """Whether it was there and is not now."""
        return self._cut_at is not None

    def lost(self, now: float, why: str) -> None:
        """It has broken."""
        if self._cut_at is None:
            self._cut_at, self._cut_by, self._failure, self._pause = now, why, "", _FIRST_S

    def failed(self, why: str) -> None:
        """An attempt to have it again came to nothing."""
        self._failure = why
        self._pause = min(1.5 * self._pause, _LAST_S)

    def back(self) -> None:
        """It stands."""
        self._cut_at = None

    @property
    def pause(self) -> float:
        """Seconds until the next attempt."""
        return self._pause

    def trouble(self, now: float) -> str:
        """Why nothing passes; "" while it stands."""
        if self._cut_at is None:
            return ""
        told = f"the SSH connection is cut for {max(0, round(now - self._cut_at))} s ({self._cut_by})"
        return f"{told}; the last attempt to have it again: {self._failure}" if self._failure else told
