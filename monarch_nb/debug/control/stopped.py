"""The controller's list of what is stopped, the only one there is: fed by what ranks and supervision tell."""

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from monarch_nb.debug.records import Stopped

Listener = Callable[[str, Stopped], None]


class StoppedThreads:
    """Records of stopped threads, by session. `changed_at` is when something happened last."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._records: dict[str, Stopped] = {}
        self._over: dict[str, str] = {}  # sessions that cannot stop any more by a step, and why
        self._listeners: tuple[Listener, ...] = ()
        self.changed_at = 0.0  # monotonic

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(kind, record)` on each "stopped", "resumed", "lost" and "looked"; on any thread, so that it
        must not block. Gives a function that ends this.
        """
        with self._changed:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._changed:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return end

    # -- what is told -------------------------------------------------------------------------------------------------

    def add(self, record: Stopped) -> None:
        """A thread has stopped."""
        with self._changed:
            self._records[record.session] = record
            self._over.pop(record.session, None)
            self._touch()
        self._tell("stopped", record)

    def look(self, session: str, current: int, source: tuple[str, ...], first: int) -> None:
        """Another frame of it is looked at."""
        with self._changed:
            record = self._records.get(session)
            if record is None:
                return
            record = msgspec.structs.replace(record, current=current, source=source, first=first)
            self._records[session] = record
        self._tell("looked", record)

    def resume(self, session: str, number: int | None = None) -> Stopped | None:
        """It goes on; of stop `number` only, if given: it may have stopped anew. The record, if it was stopped."""
        with self._changed:
            record = self._records.get(session)
            if number is not None and (record is None or record.number != number):
                return None
            self._records.pop(session, None)
            self._touch()
        if record is not None:
            self._tell("resumed", record)
        return record

    def end(self, session: str, why: str) -> Stopped | None:
        """It goes on, and what it was stepping through has ended. The record, if it was stopped."""
        with self._changed:
            record = self._records.pop(session, None)
            self._over[session] = why
            self._touch()
        if record is not None:
            self._tell("resumed", record)
        return record

    def lose(self, address: str, why: str) -> list[Stopped]:
        """A process is gone, with all that was stopped there."""
        with self._changed:
            gone = [record for record in self._records.values() if record.address == address]
            for record in gone:
                del self._records[record.session]
                self._over[record.session] = why
            if gone:
                self._touch()
        for record in gone:
            self._tell("lost", record)
        return gone

    def _touch(self) -> None:
        self.changed_at = time.monotonic()
        self._changed.notify_all()

    def _tell(self, kind: str, record: Stopped) -> None:
        for listener in self._listeners:
            listener(kind, record)

    # -- what is asked ------------------------------------------------------------------------------------------------

    def records(self) -> list[Stopped]:
        """All that is stopped, by actor and rank."""
        with self._changed:
            return sorted(self._records.values(), key=lambda each: (each.name, each.mesh, each.rank, each.session))

    @property
    def any(self) -> bool:
        """Whether anything is stopped; costs nothing."""
        return bool(self._records)

    def get(self, session: str) -> Stopped | None:
        """One, if it is stopped."""
        with self._changed:
            return self._records.get(session)

    def holding(self, mesh: str, rank: int) -> Stopped | None:
        """What keeps an actor from its messages, if anything of it is stopped so; costs nothing where nothing is."""
        if not self._records:
            return None
        with self._changed:
            stops = [each for each in self._records.values() if each.place == (mesh, rank) and each.in_the_way]
        return stops[-1] if stops else None

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
                session in self._over or (session in self._records and self._records[session].number > number)
                for session, number in waiting
            )

        self.wait(timeout, settled)
