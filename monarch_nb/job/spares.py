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

_REFILLS, _WITHIN_S = 3, 600.0  # limits how often a failed spare is replaced


class Spares:
    """The spares of one mesh. They belong to no host mesh, so that the death of one fails nothing."""

    def __init__(
        self, mesh: str, known_as: str, *, start: Callable[[int], dict[str, Arrival]],
        drop: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`start` requests a number of hosts, and returns their arrivals by name; `drop` gives one up, by name."""
        self._mesh, self._known_as, self._start, self._drop = mesh, known_as, start, drop
        self._lock = threading.RLock()
        self._arrivals: dict[str, Arrival] = {}  # by name; they have joined, or may yet
        self._target = 0
        self._limit = Intensity(_REFILLS, _WITHIN_S)
        self._closed = False
        self._runtime = current_runtime()

    def follow(self, arrivals: dict[str, Arrival], count: int) -> None:
        """Adds requested spares; `count` is how many there should be."""
        with self._lock:
            self._target = count
            self._arrivals.update(arrivals)
            if self._on_event not in self._runtime.part(MeshEvents).listeners and not self._closed:
                self._runtime.part(MeshEvents).listeners.append(self._on_event)
        for name, arrival in arrivals.items():
            when_done(arrival.hosts[self._mesh], partial(self._on_arrival, name))

    @property
    def arrivals(self) -> list[Arrival]:
        """The arrivals of the spares."""
        with self._lock:
            return list(self._arrivals.values())

    @property
    def target(self) -> int:
        """The number of spares that there should be."""
        return self._target

    def waiting(self) -> dict[str, str]:
        """Returns the ids of spares that can be used now, by name. Does not block."""
        attached = self._runtime.part(HostRoutes).attached
        with self._lock:
            hosts = {name: host for name, arrival in self._arrivals.items() if (host := _host(arrival, self._mesh))}
        return {name: host for name, host in hosts.items() if host in attached and not attached[host].lost}

    def take(self, count: int) -> dict[str, tuple[str, Arrival]]:
        """Removes at most `count` usable spares; returns the id and the arrival of each by name."""
        with self._lock:
            spares = dict(list(self.waiting().items())[:count])
            return {name: (host, self._arrivals.pop(name)) for name, host in spares.items()}

    def refill(self) -> None:
        """Requests missing spares from the engine, in the background."""
        threading.Thread(target=self._refill, name="monarch-spares", daemon=True).start()

    def close(self) -> None:
        """Stops watching: the job is about to be killed, or is no longer used here."""
        with self._lock:
            self._closed = True
        listeners = self._runtime.part(MeshEvents).listeners
        if self._on_event in listeners:
            listeners.remove(self._on_event)

    def _refill(self) -> None:
        with self._lock:
            missing = 0 if self._closed else self._target - len(self._arrivals)
            if missing <= 0:
                return
            wait = self._limit.wait(self._mesh, 0, time.monotonic())
            if wait is not None:
                show_host_message(
                    f"{self._known_as}: {self._mesh} has no spare host any more: {_REFILLS} came to nothing within "
                    f"{_WITHIN_S:.0f} s"
                )
                return
            self._limit.count(self._mesh, 0, time.monotonic())
        try:
            arrivals = self._start(missing)
        except (EngineError, OSError, ValueError) as error:
            if not self._closed:
                show_host_message(f"{self._known_as}: there is no new spare host for {self._mesh}: {error}")
            return
        self.follow(arrivals, self._target)

    # -- their ends, on threads of the engine ---------------------------------------------------------------

    def _on_arrival(self, name: str, future: Future[tuple[str, ...]]) -> None:
        error = future.exception(0)
        if error is not None:
            reason = error.missing.get(name, "") if isinstance(error, HostsMissingError) else ""
            self._lose(name, reason or str(error))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, HostLost):
            with self._lock:
                names = [name for name, arrival in self._arrivals.items() if _host(arrival, self._mesh) == event.host]
            remote = self._runtime.part(HostRoutes).attached.get(event.host)
            for name in names:
                self._lose(name, f"(host {event.host}) is lost: {remote.lost if remote is not None else 'it is gone'}")

    def _lose(self, name: str, reason: str) -> None:
        with self._lock:
            arrival = None if self._closed else self._arrivals.pop(name, None)
        if arrival is None:
            return
        show_host_message(f"{self._known_as}: the spare host {name} {reason}. No mesh was on it")

        def replace() -> None:
            arrival.stop("it came to nothing")
            self._drop(name)
            self._refill()

        threading.Thread(target=replace, name="monarch-spares", daemon=True).start()


def _host(arrival: Arrival, mesh: str) -> str:
    """Returns the id of the host of an arrival; empty until it has joined."""
    future = arrival.hosts[mesh]
    return future.get(0)[0] if future.done() and future.exception(0) is None else ""
