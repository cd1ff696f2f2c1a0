"""Numbers for frames and for children of values, in a range that no other debugger uses. Pure."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from monarch_nb.debug import Stopped

FIRST = 1 << 28  # the kernel's own debugger counts from 1


def is_ours(number: object) -> bool:
    """Returns whether a number is one of the mesh's adapter."""
    return isinstance(number, int) and number >= FIRST


@dataclass(frozen=True)
class FrameHandle:
    """A frame of a stop, or what a reference of it holds."""

    session: str
    stop: int  # which stop of the session
    frame: int  # 0 is the outermost
    reference: int = 0
    edition: int = 0


class Handles:
    """Numbers of frames and references; they stay the same while a rank is stopped and are dropped when it resumes."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST)
        self._by_number: dict[int, FrameHandle] = {}
        self._by_handle: dict[FrameHandle, int] = {}

    def number(self, handle: FrameHandle) -> int:
        """Returns the number of a frame or a reference."""
        number = self._by_handle.get(handle)
        if number is None:
            number = self._by_handle[handle] = next(self._numbers)
            self._by_number[number] = handle
        return number

    def get(self, number: object) -> FrameHandle | None:
        """Returns the handle of a number, if it is still valid."""
        return self._by_number.get(number) if isinstance(number, int) else None

    def keep(self, records: Iterable[Stopped]) -> None:
        """Drops the numbers of stops that have ended."""
        stops = {(record.session, record.number) for record in records}
        for number, handle in tuple(self._by_number.items()):
            if (handle.session, handle.stop) not in stops:
                del self._by_number[number], self._by_handle[handle]
