"""The controller's list of stopped threads, fed by messages of ranks and by supervision."""

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from monarch_nb.debug.records import Stopped

Listener = Callable[[str, Stopped], None]


class StoppedThreads:
    """Records of stopped threads, by session. `changed_at` is the time of the last change."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._records: dict[str, Stopped] = {}
        self._over: dict[str, str] = {}  # sessions whose step will not stop again, and the reasons
        self._listeners: tuple[Listener, ...] = ()
        self.changed_at = 0.0  # monotonic

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(kind, record)` on each "stopped", "resumed", "lost" and "looked"; on any thread, so that it
        must not block. Returns a function that ends this.
        """
        with self._changed:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._changed:
                self._listeners = tuple(entry for entry in self._listeners if entry is not listener)

        return end

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, record: Stopped) -> None:
        """Adds a thread that has stopped."""
        with self._changed:
            self._records[record.session] = record
            self._over.pop(record.session, None)
            self._touch()
        self._notify("stopped", record)

    def look(self, session: str, current: int, source: tuple[str, ...], first: int) -> None:
        """Records the frame that is selected now."""
        with self._changed:
            record = self._records.get(session)
            if record is None:
                return
            record = msgspec.structs.replace(record, current=current, source=source, first=first)
            self._records[session] = record
        self._notify("looked", record)

    def resume(self, session: str, number: int | None = None) -> Stopped | None:
        """Removes a session that resumed and returns its record; only stop `number`, if given."""
        with self._changed:
            record = self._records.get(session)
            if number is not None and (record is None or record.number != number):
                return None
            self._records.pop(session, None)
            self._touch()
        if record is not None:
            self._notify("resumed", record)
        return record

    def end(self, session: str, reason: str) -> Stopped | None:
        """Removes a session whose step has ended with its endpoint; returns the record, if it was stopped."""
        with self._changed:
            record = self._records.pop(session, None)
            self._over[session] = reason
            self._touch()
        if record is not None:
            self._notify("resumed", record)
        return record

    def lose(self, address: str, reason: str) -> list[Stopped]:
        """Removes all sessions of a process that has ended."""
        with self._changed:
            lost = [record for record in self._records.values() if record.address == address]
            for record in lost:
                del self._records[record.session]
                self._over[record.session] = reason
            if lost:
                self._touch()
        for record in lost:
            self._notify("lost", record)
        return lost

    def _touch(self) -> None:
        self.changed_at = time.monotonic()
        self._changed.notify_all()

    def _notify(self, kind: str, record: Stopped) -> None:
        for listener in self._listeners:
            listener(kind, record)

    # -- queries ------------------------------------------------------------------------------------------------------

    def records(self) -> list[Stopped]:
        """Returns all stopped threads, by actor and rank."""
        with self._changed:
            return sorted(
                self._records.values(), key=lambda record: (record.name, record.mesh, record.rank, record.session)
            )

    @property
    def any(self) -> bool:
        """True if anything is stopped; takes no lock."""
        return bool(self._records)

    def get(self, session: str) -> Stopped | None:
        """Returns the record of a session, if it is stopped."""
        with self._changed:
            return self._records.get(session)

    def holding(self, mesh: str, rank: int) -> Stopped | None:
        """Returns the stop that keeps an actor from its messages, if any; takes no lock where nothing is stopped."""
        if not self._records:
            return None
        with self._changed:
            stops = [stop for stop in self._records.values() if stop.place == (mesh, rank) and stop.blocks_actor]
        return stops[-1] if stops else None

    def end_reason(self, session: str) -> str:
        """Returns the reason why a session will not stop again after its step; "" while unknown."""
        with self._changed:
            return self._over.get(session, "")

    def wait(self, timeout: float, until: Callable[[], bool]) -> bool:
        """Blocks until `until()` is true, checked after each change; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not until():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(min(remaining, 0.5))
            return True

    def settle(self, quiet: float, limit: float = 0.3) -> None:
        """Blocks until nothing has changed for `quiet` seconds, at most `limit` seconds."""
        deadline = time.monotonic() + limit
        with self._changed:
            while True:
                now = time.monotonic()
                remaining = min(self.changed_at + quiet, deadline) - now
                if remaining <= 0:
                    return
                self._changed.wait(remaining)

    def wait_steps(self, before: Iterable[tuple[str, int]], timeout: float) -> None:
        """Blocks until each of these sessions (with its stop's number) has stopped again or has ended."""
        waiting = list(before)

        def settled() -> bool:
            return all(
                session in self._over or (session in self._records and self._records[session].number > number)
                for session, number in waiting
            )

        self.wait(timeout, settled)
