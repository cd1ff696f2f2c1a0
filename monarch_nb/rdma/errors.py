"""Errors of transfers, the time limit and cancellation of one, and the concurrent execution of its parts."""

import threading
import time
from collections.abc import Callable, Sequence

from monarch_nb._package import more


class RDMAError(RuntimeError):
    """A transfer failed. The text names the buffer, its owner, the mover, and what to do."""


class BufferDroppedError(RDMAError):
    """The buffer was dropped, or its owner stopped: its memory is no longer on offer."""


class OwnerLostError(RDMAError):
    """The process that owns the memory has ended, or cannot be reached."""


def owner_lost(buffer: object, reason: str) -> OwnerLostError:
    """Returns the error for a buffer whose process does not answer, with the remedy."""
    return OwnerLostError(
        f"{buffer} cannot be reached: {reason}. Heal its mesh (monarch.actor.heal_mesh) and make a new buffer there"
        + more("manual/data.md#how-long-a-buffer-lives")
    )


class TransferCancelledError(RDMAError):
    """The transfer was cancelled before its end."""


_LONGEST_S = 1e9  # sockets take no infinite time-out


class Limit:
    """The limit of one operation of a user, which movers check between pieces."""

    __slots__ = ("_cancelled", "_doing", "_end", "_subject", "seconds")

    def __init__(self, seconds: float, doing: str, subject: object = "") -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ValueError(f"timeout must be a number of seconds >= 0, not {seconds!r}")
        self.seconds = seconds
        self._doing, self._subject = doing, subject  # formatted on demand
        self._end = time.monotonic() + min(seconds, _LONGEST_S)
        self._cancelled = False

    @property
    def title(self) -> str:
        """Text such as "reading buffer 3 of trainer"."""
        return f"{self._doing} {self._subject}".rstrip()

    def cancel(self) -> None:
        """Ends the operation at the next piece."""
        self._cancelled = True

    def remaining(self) -> float:
        """Returns the seconds left. Raises TimeoutError at the limit, TransferCancelledError after `cancel`."""
        if self._cancelled:
            raise TransferCancelledError(f"{self.title} was cancelled")
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError(
                f"{self.title} took longer than {self.seconds:g} s: give it more with timeout=..., or look whether its "
                "owner still answers"
            )
        return seconds


def side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Calls all functions concurrently, the first on this thread. Blocks until all are done; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works[1:]]
    for thread in threads:
        thread.start()
    run(works[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
