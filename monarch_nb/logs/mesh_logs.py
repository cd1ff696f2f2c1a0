"""The logs of the meshes that this process has spawned: followed from their start, shown by one presenter.

Display options of each mesh are set by `ProcMesh.logging_option` and `--no-dedup`.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from monarch_nb.logs.lines import Sources, mesh_of, rank_of
from monarch_nb.logs.receiver import LogReceiver
from monarch_nb.logs.verbs import PROC_LOG
from monarch_nb.mesh.mesh_events import Event, MeshHealed, MeshStopped, ProcStarted
from monarch_nb.runtime import (
    ActorState,
    Future,
    MeshState,
    PendingCall,
    ProcState,
    Runtime,
    fail_future,
    pending_future,
    resolve_future,
    when_done,
)
from monarch_nb.settings import settings
from monarch_nb.wire import host_of

FORGET_SECONDS = 5.0  # after the end of a mesh, whose last output may still be in transit

logger = logging.getLogger(__name__)


class LogOption(Struct):
    """Options of one mesh."""

    stream: bool | None = None  # None: the default of this kind of process
    window: float | None = None  # seconds in which equal lines are gathered
    level: int = 0
    dedup: bool | None = None  # None: the setting log_dedup


class LogOptions:
    """Options of the meshes that this process has spawned."""

    def __init__(self) -> None:
        self._by_uid: dict[str, LogOption] = {}

    def of(self, address: str) -> LogOption | None:
        """Returns the options for the mesh of a process."""
        return self._by_uid.get(mesh_of(address)) if self._by_uid else None

    def set(self, uid: str, option: LogOption) -> None:
        """Sets the options of a mesh, except the merging of equal lines."""
        before = self._by_uid.get(uid)
        if before is not None:
            option.dedup = before.dedup
        self._by_uid[uid] = option

    def level(self, uid: str) -> int:
        """Returns the level from which processes of a mesh write records of `logging`; 0 if none is set."""
        option = self._by_uid.get(uid)
        return 0 if option is None else option.level

    def set_merging(self, uid: str, merges: bool | None) -> None:
        """Sets whether equal lines of several ranks of a mesh are shown once; None follows the setting log_dedup."""
        if merges is None and uid not in self._by_uid:
            return
        self._by_uid.setdefault(uid, LogOption()).dedup = merges

    def merges(self, address: str) -> bool:
        """Returns whether equal lines of the mesh of a process are shown once."""
        option = self.of(address)
        merges = option.dedup if option is not None else None
        return settings.log_dedup if merges is None else merges


def set_level(level: int) -> None:
    """Sets the level, in a process, from which records of `logging` are written."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    root.setLevel(level)
    for handler in root.handlers:  # loggers with their own level, such as those of actors, ignore the root's
        handler.setLevel(level)


def only_call(address: str, calls: Iterable[PendingCall[object]], meshes: Mapping[str, MeshState]) -> str:
    """Returns the only call that waits for an answer of a process, "" if there are none or several."""
    uid, rank = mesh_of(address), rank_of(address)
    claimed = ""
    for call in calls:
        state = meshes.get(call.mesh)
        procs = state.procs.uid if isinstance(state, ActorState) else call.mesh
        if procs == uid and rank in call.missing_ranks():
            if claimed:
                return ""
            claimed = call.call
    return claimed


class Presenter(Protocol):
    """Shows what processes write: a script's standard output, or a notebook's cells."""

    def settle(self) -> None:
        """Shows the output that preceded the replies and ends known here; blocks for it, not long."""

    def close(self) -> None:
        """Shows all pending output, and nothing from then on."""


class MeshLogs:
    """Logs of this process's meshes. `set_level` sets the level of `logging` in one process of a mesh, by base rank."""

    def __init__(self, runtime: Runtime, set_level: Callable[[ProcState, int, int], object]) -> None:
        self._runtime = runtime
        self._set_level = set_level
        self._presenter: Presenter | None = None
        self._shown_ends: weakref.WeakKeyDictionary[Future[None], Future[None]] = weakref.WeakKeyDictionary()
        self.options = LogOptions()
        self.sources = Sources(runtime.meshes)
        self.positions = runtime.log_positions
        self.receiver = LogReceiver(runtime.post, self._claim)
        runtime.verbs.handle(PROC_LOG, lambda message, asker: self.receiver.take(message.chunks, asker.src))

    def _claim(self, address: str) -> str:
        return only_call(address, tuple(self._runtime.calls.values()), self._runtime.meshes)

    # -- presentation ----------------------------------------------------------------------------------------------

    def present(self, presenter: Presenter | None) -> None:
        """Makes `presenter` show the lines; closes the one before."""
        before, self._presenter = self._presenter, presenter
        if before is not None:
            before.close()

    def settle(self) -> None:
        """Shows the output that preceded the replies and ends known here; blocks for it, not long."""
        if self._presenter is not None:
            self._presenter.settle()

    def close(self) -> None:
        """Shows all pending output at the end of this process."""
        self.present(None)

    def set_option(self, uid: str, option: LogOption) -> None:
        """Sets how output of a mesh is shown from now on; earlier lines are shown as set before."""
        self.settle()
        self.options.set(uid, option)

    def shown(self, stopped: Future[None]) -> Future[None]:
        """Resolves as the end of a mesh does, once its last output is shown."""
        future = self._shown_ends.get(stopped)  # a second stop gives the first one's future
        if future is not None:
            return future
        displayed: Future[None] = pending_future(describe=stopped.describe)
        self._shown_ends[stopped] = displayed

        def show() -> None:
            try:
                self.settle()
            except Exception:  # the presenter is gone
                logger.debug("output could not be shown", exc_info=True)
            error = stopped.exception(0)
            resolve_future(displayed, None) if error is None else fail_future(displayed, error)

        # Not on the reading thread, which receives the awaited output.
        when_done(stopped, lambda _: threading.Thread(target=show, name="monarch-last-words", daemon=True).start())
        return displayed

    # -- events of meshes --------------------------------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        """Handles an event of a mesh, on an engine's thread."""
        match event:
            case ProcStarted(address, log=log) if self.sources.spawned_here(mesh_of(address)):
                self.receiver.follow(address, log)
            case MeshStopped(ProcState(uid=uid)):
                self._runtime.later(FORGET_SECONDS, lambda: self._forget(uid))
            case MeshHealed(ProcState() as state, back):
                level = self.options.level(state.uid)
                for rank, _ in back if level else ():
                    self._set_level(state, rank, level)
            case _:
                return

    def _forget(self, uid: str) -> None:
        self.receiver.forget(uid)
        self.positions.forget(uid)

    def file(self, address: str) -> str:
        """Returns the path of a process's whole log, after the name of another host; "" if unknown."""
        path = self.receiver.file(address)
        host = host_of(address)
        return path if not path or host in self._runtime.local_hosts else f"{host}:{path}"
