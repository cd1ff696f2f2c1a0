"""Spare hosts of a job's mesh, which have joined and wait to replace lost ones."""

import threading
import time
from collections.abc import Callable
from functools import partial

from monarch_nb.connect.routes import HostRoutes
from monarch_nb.job.adapter import EngineError
from monarch_nb.job.arrival import Arrival, HostsMissingError
from monarch_nb.lifecycle.notices import show_host_message
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents
from monarch_nb.runtime import Future, current_runtime, when_done
from monarch_nb.supervision import Intensity

_ASKED, _WITHIN_S = 3, 600.0  # limits how often a failed spare is replaced


class Spares:
    """The spares of one mesh. They belong to no host mesh, so that the death of one fails nothing."""

    def __init__(
        self, mesh: str, known_as: str, *, start: Callable[[int], dict[str, Arrival]],
        drop: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`start` requests so many hosts, which then come; `drop` gives one up, by name."""
        self._mesh, self._known_as, self._start, self._drop = mesh, known_as, start, drop
        self._lock = threading.RLock()
        self._coming: dict[str, Arrival] = {}  # by name; they have joined, or may yet
        self._wanted = 0
        self._asked = Intensity(_ASKED, _WITHIN_S)
        self._closed = False
        self._runtime = current_runtime()

    def follow(self, arrivals: dict[str, Arrival], wanted: int) -> None:
        """These have been asked for; so many are to be there."""
        with self._lock:
            self._wanted = wanted
            self._coming.update(arrivals)
            if self._happened not in self._runtime.part(MeshEvents).listeners and not self._closed:
                self._runtime.part(MeshEvents).listeners.append(self._happened)
        for name, arrival in arrivals.items():
            when_done(arrival.hosts[self._mesh], partial(self._came, name))

    @property
    def arrivals(self) -> list[Arrival]:
        """How they come in."""
        with self._lock:
            return list(self._coming.values())

    @property
    def wanted(self) -> int:
        """How many there should be."""
        return self._wanted

    def waiting(self) -> dict[str, str]:
        """The ids of those that can be used now, by name. Does not block."""
        attached = self._runtime.part(HostRoutes).attached
        with self._lock:
            there = {name: host for name, arrival in self._coming.items() if (host := _joined(arrival, self._mesh))}
        return {name: host for name, host in there.items() if host in attached and not attached[host].lost}

    def take(self, count: int) -> dict[str, tuple[str, Arrival]]:
        """At most so many of them, at once, by name: the id of each, and how it came. They are spares no more."""
        with self._lock:
            taken = dict(list(self.waiting().items())[:count])
            return {name: (host, self._coming.pop(name)) for name, host in taken.items()}

    def refill(self) -> None:
        """Asks the engine for as many as are missing, in the background; nothing where it gives none."""
        threading.Thread(target=self._refill, name="monarch-spares", daemon=True).start()

    def close(self) -> None:
        """The job is about to be killed, or is not used here any more."""
        with self._lock:
            self._closed = True
        listeners = self._runtime.part(MeshEvents).listeners
        if self._happened in listeners:
            listeners.remove(self._happened)

    def _refill(self) -> None:
        with self._lock:
            missing = 0 if self._closed else self._wanted - len(self._coming)
            if missing <= 0:
                return
            wait = self._asked.wait(self._mesh, 0, time.monotonic())
            if wait is not None:
                show_host_message(
                    f"{self._known_as}: {self._mesh} has no spare host any more: {_ASKED} came to nothing within "
                    f"{_WITHIN_S:.0f} s"
                )
                return
            self._asked.count(self._mesh, 0, time.monotonic())
        try:
            arrivals = self._start(missing)
        except (EngineError, OSError, ValueError) as error:
            if not self._closed:
                show_host_message(f"{self._known_as}: there is no new spare host for {self._mesh}: {error}")
            return
        self.follow(arrivals, self._wanted)

    # -- what becomes of them, on threads of the engine ---------------------------------------------------------------

    def _came(self, name: str, came: Future[tuple[str, ...]]) -> None:
        error = came.exception(0)
        if error is not None:
            why = error.missing.get(name, "") if isinstance(error, HostsMissingError) else ""
            self._gone(name, why or str(error))

    def _happened(self, event: Event) -> None:
        if isinstance(event, HostLost):
            with self._lock:
                names = [name for name, each in self._coming.items() if _joined(each, self._mesh) == event.host]
            remote = self._runtime.part(HostRoutes).attached.get(event.host)
            for name in names:
                self._gone(name, f"(host {event.host}) is lost: {remote.lost if remote is not None else 'it is gone'}")

    def _gone(self, name: str, why: str) -> None:
        with self._lock:
            arrival = None if self._closed else self._coming.pop(name, None)
        if arrival is None:
            return
        show_host_message(f"{self._known_as}: the spare host {name} {why}. No mesh was on it")

        def replace() -> None:
            arrival.stop("it came to nothing")
            self._drop(name)
            self._refill()

        threading.Thread(target=replace, name="monarch-spares", daemon=True).start()


def _joined(arrival: Arrival, mesh: str) -> str:
    """The id of the one host that an arrival brings; empty while it has not come."""
    future = arrival.hosts[mesh]
    return future.get(0)[0] if future.done() and future.exception(0) is None else ""
