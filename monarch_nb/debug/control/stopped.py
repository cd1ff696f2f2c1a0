"""The controller's list of what is stopped: pure, thread-safe, fed by what ranks and supervision tell."""

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from monarch_nb.debug.records import Stopped

Listener = Callable[[str, Stopped], None]


class Book:
    """Sessions by id. `changed` grows with everything that happens."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._sessions: dict[str, Stopped] = {}
        self._over: dict[str, str] = {}  # sessions that cannot stop any more by a step, and why
        self.listeners: list[Listener] = []
        self.changed = 0
        self.changed_at = 0.0  # monotonic

    # -- what is told -------------------------------------------------------------------------------------------------

    def stopped(self, record: Stopped) -> None:
        """A thread has stopped."""
        with self._changed:
            self._sessions[record.session] = record
            self._over.pop(record.session, None)
            self._touch()
        self._tell("stopped", record)

    def looked(self, session: str, current: int, source: tuple[str, ...], first: int) -> None:
        """Another frame of it is looked at."""
        with self._changed:
            record = self._sessions.get(session)
            if record is None:
                return
            record = msgspec.structs.replace(record, current=current, source=source, first=first)
            self._sessions[session] = record
        self._tell("looked", record)

    def resumed(self, session: str, number: int | None = None) -> bool:
        """It goes on; of stop `number` only, if that is given: it may have stopped anew. Whether it was stopped."""
        with self._changed:
            record = self._sessions.get(session)
            if number is not None and (record is None or record.number != number):
                return False
            self._sessions.pop(session, None)
            self._touch()
        if record is not None:
            self._tell("resumed", record)
        return record is not None

    def over(self, session: str, why: str) -> None:
        """It goes on, and what it was stepping through has ended."""
        with self._changed:
            record = self._sessions.pop(session, None)
            self._over[session] = why
            self._touch()
        if record is not None:
            self._tell("resumed", record)

    def lost(self, address: str, why: str) -> list[Stopped]:
        """A process is gone, with all that was stopped there."""
        with self._changed:
            gone = [record for record in self._sessions.values() if record.address == address]
            for record in gone:
                del self._sessions[record.session]
                self._over[record.session] = why
            if gone:
                self._touch()
        for record in gone:
            self._tell("lost", record)
        return gone

    def _touch(self) -> None:
        self.changed += 1
        self.changed_at = time.monotonic()
        self._changed.notify_all()

    def _tell(self, kind: str, record: Stopped) -> None:
        for listener in tuple(self.listeners):
            listener(kind, record)

    # -- what is asked ------------------------------------------------------------------------------------------------

    def sessions(self) -> list[Stopped]:
        """All that is stopped, by actor and rank."""
        with self._changed:
            return sorted(self._sessions.values(), key=lambda one: (one.name, one.mesh, one.rank, one.session))

    @property
    def any(self) -> bool:
        """Whether anything is stopped; costs nothing."""
        return bool(self._sessions)

    def get(self, session: str) -> Stopped | None:
        """One, if it is stopped."""
        with self._changed:
            return self._sessions.get(session)

    def in_the_way(self, place: tuple[str, int]) -> Stopped | None:
        """What keeps a rank from its messages, if anything of it is stopped so."""
        with self._changed:
            found = [one for one in self._sessions.values() if one.place == place and one.in_the_way]
        return found[-1] if found else None

    def why_over(self, session: str) -> str:
        """Why a session that was let go by a step will not stop; "" while that is not known."""
        with self._changed:
            return self._over.get(session, "")

    def wait(self, timeout: float, until: Callable[[], bool]) -> bool:
        """Blocks until `until()`, looked at after each change; False when time is up."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not until():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
            return True

    def settle(self, quiet: float, limit: float = 0.3) -> None:
        """Blocks until nothing has happened for `quiet` seconds, and for at most `limit`."""
        deadline = time.monotonic() + limit
        with self._changed:
            while True:
                now = time.monotonic()
                left = min(self.changed_at + quiet, deadline) - now
                if left <= 0:
                    return
                self._changed.wait(left)

    def wait_steps(self, before: Iterable[tuple[str, int]], timeout: float) -> None:
        """Blocks until each of these sessions (with the number of its stop) has stopped anew or is over."""
        waiting = list(before)

        def settled() -> bool:
            return all(
                session in self._over or (session in self._sessions and self._sessions[session].number > number)
                for session, number in waiting
            )

        self.wait(timeout, settled)
