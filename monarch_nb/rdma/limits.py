"""Time limit and cancellation of a transfer."""

import time

from monarch_nb.rdma.errors import TransferCancelledError

__all__ = ["Limit"]


class Limit:
    """The limit of one operation of a user, which movers check between pieces."""

    __slots__ = ("_cancelled", "_doing", "_end", "_what", "seconds")

    def __init__(self, seconds: float, doing: str, what: object = "") -> None:
        self.seconds = seconds
        self._doing, self._what = doing, what  # formatted on demand
        self._end = time.monotonic() + seconds
        self._cancelled = False

    @property
    def title(self) -> str:
        """Text such as "reading buffer 3 of trainer"."""
        return f"{self._doing} {self._what}".rstrip()

    def cancel(self) -> None:
        """Ends the operation at the next piece."""
        self._cancelled = True

    def left(self) -> float:
        """Seconds left. Raises TimeoutError at the limit, TransferCancelledError after `cancel`."""
        if self._cancelled:
            raise TransferCancelledError(f"{self.title} was cancelled")
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{self.title} took longer than {self.seconds:g} s: give it more with timeout=..., or look whether its "
                "owner still answers"
            )
        return left
