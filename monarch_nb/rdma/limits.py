"""How long a transfer may take, and whether somebody has given it up."""

import time

from monarch_nb.rdma.errors import TransferCancelledError

__all__ = ["Limit"]


class Limit:
    """One per operation of a user; movers look at it between pieces."""

    __slots__ = ("_cancelled", "_doing", "_end", "_what", "seconds")

    def __init__(self, seconds: float, doing: str, what: object = "") -> None:
        self.seconds = seconds
        self._doing, self._what = doing, what  # put together only where somebody reads it
        self._end = time.monotonic() + seconds
        self._cancelled = False

    @property
    def title(self) -> str:
        """Such as "reading buffer 3 of trainer"."""
        return f"{self._doing} {self._what}".rstrip()

    def cancel(self) -> None:
        """Ends the operation at the next piece."""
        self._cancelled = True

    def left(self) -> float:
        """Seconds left; raises TimeoutError when there are none, TransferCancelledError when it was given up."""
        if self._cancelled:
            raise TransferCancelledError(f"{self.title} was cancelled")
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{self.title} took longer than {self.seconds:g} s: give it more with timeout=..., or look whether its "
                "owner still answers"
            )
        return left
