"""Meshes that nothing refers to any more: marked in displays, and ended if they are too many or memory is short."""

import gc
import logging
import threading
import time
from pathlib import Path
from typing import Any

from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshStarting
from monarch_nb.runtime import MeshState, ProcState, Runtime
from monarch_nb.settings import settings
from monarch_nb.store import events as e
from monarch_nb.store import store_of
from monarch_nb.wire import counted

from .front import Front
from .namespace import whole_mesh
from .session import Session

CHECK_S = 2.0  # between checks, while there are such meshes
MEMORY = Path("/proc/meminfo")
logger = logging.getLogger(__name__)


class UnreferencedMeshes:
    """Finds meshes of this kernel that nothing holds, at the end of cells and every few seconds while there are any.

    A mesh is held by any handle of it, of a slice, or of its actors, wherever it is: in a variable, in `Out`, `_` or
    another object; by a call that is under way; and by other processes that were sent a reference.
    """

    def __init__(self, front: Front, session: Session, runtime: Runtime) -> None:
        self._front, self._session, self._runtime = front, session, runtime
        self._since: dict[str, float] = {}  # by uid: since when nothing holds it
        self._checking = threading.Lock()
        self._scheduled = False
        self._closed = False
        runtime.part(MeshEvents).listeners.append(self._on_event)
        front.ending.append(self.check)

    def close(self) -> None:
        """Stops."""
        self._closed = True
        self._runtime.part(MeshEvents).listeners.remove(self._on_event)
        if self.check in self._front.ending:
            self._front.ending.remove(self.check)

    @property
    def meshes(self) -> list[MeshState]:
        """Meshes that nothing held at the last check, the longest first."""
        states = self._session.meshes()
        return [states[uid] for uid in sorted(self._since, key=self._since.__getitem__) if uid in states]

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MeshStarting) and self._since:
            self._schedule(0.0)  # memory is about to be needed

    def _schedule(self, seconds: float) -> None:
        if self._scheduled or self._closed or self._runtime.closed:
            return
        self._scheduled = True

        def start() -> None:
            self._scheduled = False
            threading.Thread(target=self.check, name="monarch-unheld", daemon=True).start()

        self._runtime.later(seconds, start)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Marks meshes that nothing refers to, and ends those that are due. From any thread; does not wait for ends."""
        if self._closed or self._runtime.closed or not self._checking.acquire(blocking=False):
            return
        try:
            roots = [state for state in self._session.meshes().values() if isinstance(state, ProcState)]
            unheld = [state for state in roots if not self._is_held(state)]
            now = time.time()
            before = self._since
            self._since = {state.uid: before.get(state.uid, now) for state in unheld}
            for uid in before.keys() ^ self._since.keys():
                since = self._since.get(uid)
                store_of(self._runtime).put(e.MeshUnheld(uid, None if since is None else round(since, 3)))
            if unheld:
                self._end(now)
                self._schedule(CHECK_S)
        except Exception:
            logger.exception("meshes that nothing refers to could not be looked for")
        finally:
            self._checking.release()

    def _is_held(self, state: ProcState) -> bool:
        family: list[Any] = [state, *state.actors.values()]
        uids = {mesh_state.uid for mesh_state in family}
        own = {state.address(rank) for rank in state.ranks}
        updates = self._runtime.part(ReferenceUpdates)
        return (
            any(len(mesh_state.handles) for mesh_state in family)
            or any(call.mesh in uids for call in tuple(self._runtime.calls.values()))
            or any(updates.holders(uid) - own for uid in uids)
            or state.spawn_spec is None
            or not state.spawn_spec.initialized.done()
        )

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end(self, now: float) -> None:
        due = self._due(now)
        if due:
            gc.collect()  # cycles that were not collected yet count as references: the check is repeated
        for state, reason in due:
            if self._is_held(state):
                continue
            logger.info("%s ends: nothing refers to it, and %s", state.name, reason)
            whole_mesh(state).stop(f"nothing referred to it, and {reason}")
            self._since.pop(state.uid, None)
            store_of(self._runtime).put(e.MeshUnheld(state.uid, None))
            size = counted(len(state.region), "process")
            self._front.write(f"{state.name} ({size}) ends: nothing refers to it any more, and {reason}\n")

    def _due(self, now: float) -> list[tuple[ProcState, str]]:
        """Meshes that are due to end, and the reasons."""
        states = [state for state in self.meshes if isinstance(state, ProcState)]
        limit, most, share = settings.mesh_unheld_timeout, settings.mesh_unheld_most, settings.mesh_unheld_memory / 100
        reasons: dict[str, tuple[ProcState, str]] = {}
        for state in states[: max(0, len(states) - most)]:
            reasons[state.uid] = (state, f"there are more than {most} such meshes (mesh_unheld_most)")
        for state in states:
            if limit and now - self._since[state.uid] >= limit:
                reasons.setdefault(state.uid, (state, f"{limit:g} s have passed (mesh_unheld_timeout)"))
        free = free_memory()
        if states and free is not None and free < share:
            reason = f"{free:.0%} of the memory of this machine are free (mesh_unheld_memory)"
            reasons.setdefault(states[0].uid, (states[0], reason))  # one at a time: that may be enough
        return list(reasons.values())


def free_memory() -> float | None:
    """Returns the share of this machine's memory that is available; None if the system does not say."""
    try:
        lines = MEMORY.read_text("ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return free / total if total and free is not None else None
