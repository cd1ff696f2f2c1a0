"""What has come on a link: frames in order, those that came too early, and what is owed to the sender."""

from typing import Generic

from monarch_nb.routing.actions import Action, Deliver, LinkConfig, Skipped, T

__all__ = ["Incoming"]


class Incoming(Generic[T]):
    """The receiving half of a link."""

    __slots__ = (
        "_ack_bytes",
        "_ack_frames",
        "_buffer",
        "_config",
        "_credit",
        "_expect",
        "_owed",
        "_owed_bytes",
        "_owed_credit",
    )

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._expect = 0
        self._buffer: dict[int, tuple[T, int]] = {}  # (item, charge) behind a gap
        self._credit = 0  # consumed by our application, KiB
        self._owed = 0  # frames not yet acknowledged
        self._owed_bytes = 0
        self._owed_credit = 0
        self._ack_frames = config.ack_frames
        self._ack_bytes = config.ack_bytes

    def _take(self, seq: int, item: T, charge: int, size: int, actions: list[Action[T]]) -> None:
        self._owed += 1
        self._owed_bytes += size
        if seq == self._expect:
            self._expect = seq + 1
            actions.append(Deliver(item, charge))
            self._drain(actions)
        elif seq > self._expect and len(self._buffer) < self._config.buffered:
            self._buffer.setdefault(seq, (item, charge))

    def _drain(self, actions: list[Action[T]]) -> None:
        buffer = self._buffer
        while buffer and (entry := buffer.pop(self._expect, None)) is not None:
            self._expect += 1
            actions.append(Deliver(*entry))

    def _skip_to(self, base: int, actions: list[Action[T]]) -> None:
        """The peer holds nothing below `base` any more: what of it is missing here will never come."""
        if base <= self._expect:
            return
        actions.append(Skipped(self._expect, base - self._expect))
        for seq in [seq for seq in self._buffer if seq < base]:
            del self._buffer[seq]
        self._expect = base
        self._drain(actions)
