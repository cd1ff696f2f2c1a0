"""Handover of a process to a new owner of its mesh, with the reports from the time without one."""

import logging
import time

import msgspec

from monarch_nb.host import protocol as p
from monarch_nb.host.verbs import NEW_OWNER
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.mesh_events import MeshEvents, OwnerChanged
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.verbs import (
    ACTOR_FAILED,
    RESULT,
    RESULTS,
    ResultBody,
    StoredResult,
    StoredResults,
    WantedResult,
    WantedResults,
)
from monarch_nb.runtime import ActorCell, MeshState, RunsOn, Runtime, calls_of
from monarch_nb.runtime.sender import caller_of
from monarch_nb.runtime.verbs import UNREAD, UnreadState
from monarch_nb.supervision import ActorEnd, Driver
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, Status, parse_address

logger = logging.getLogger(__name__)


class Handover:
    """Handles announcements of new owners, and their requests, on the reading thread; one per process."""

    def __init__(self, runtime: Runtime, driver: Driver, registry: MeshRegistry, watcher: ProcessWatcher,
                 updates: ReferenceUpdates, events: MeshEvents) -> None:  # fmt: skip
        self._runtime, self._driver, self._updates = runtime, driver, updates
        self._registry, self._watcher, self._events = registry, watcher, events
        self._turns: dict[str, int] = {}  # by mesh
        runtime.verbs.handle(NEW_OWNER, self._on_new_owner)
        runtime.verbs.handle(RESULTS, self._results)
        runtime.verbs.handle(RESULT, self._result)
        runtime.verbs.handle(UNREAD, self._on_unread)

    def report_to_owner(self, process: str, end: ActorEnd) -> None:
        """Reports a failed actor to its owner, unless the owner has detached: the next owner requests all states."""
        if process not in self._runtime.local.away:
            self._runtime.post(process, ACTOR_FAILED, end)

    def _on_new_owner(self, news: p.NewOwner, asker: Asker[p.Welcome]) -> p.Welcome:
        states = [state for uid in news.meshes if (state := self._runtime.meshes.get(uid)) is not None]
        outdated = any(news.turn < self._turns.get(uid, 0) for uid in news.meshes)
        if not outdated:
            self._turns.update(dict.fromkeys(news.meshes, news.turn))
            if news.owner:
                self._take_over(states, news)
            elif self._belongs_to(news):
                self._release({state.owner_process for state in states}, news.unread)
                self._events.publish(OwnerChanged(""))
        return self._welcome(set(news.meshes)) if asker.waits else p.Welcome()

    def _belongs_to(self, news: p.NewOwner) -> bool:
        """Returns whether this process belongs to the mesh, rather than to another one whose actors refer to it."""
        return parse_address(self._runtime.address).mesh in news.meshes

    def _take_over(self, states: list[MeshState], news: p.NewOwner) -> None:
        local, owner = self._runtime.local, news.owner
        former = {state.owner_process for state in states} - {owner}
        for state in states:
            state.owner_process = owner
        belongs = self._belongs_to(news)
        if belongs:
            self._obey(owner, former, [cell for cell in tuple(local.cells.values()) if cell.mesh in news.meshes])
        self._driver.feed(lambda machine: machine.handed_over(news.meshes, owner))
        for state in states:  # the new owner does not know the holders of references
            try:
                self._updates.subscribe(state)
            except TransportError:
                logger.debug("%s cannot be informed of a reference", owner, exc_info=True)
        if belongs:
            self._events.publish(OwnerChanged(owner))

    def _obey(self, owner: str, former: set[str], cells: list[ActorCell]) -> None:
        """Makes a process the owner of this one's actors; answers for earlier ones are stored."""
        local = self._runtime.local
        for cell in cells:
            former.add(cell.spec.owner_process)
            cell.hand_over(owner)
        former.discard(owner)
        # Calls of the mesh's former controller belong to this one too.
        self._release({process for process in former if parse_address(process).is_controller})
        if cells:
            self._watcher.watch_owner(owner)
        if owner in local.away:  # the same owner has returned, but no longer waits for its former calls
            calls = [call for cell in tuple(local.cells.values()) for call in calls_of(cell)]
            local.orphans.update(call for call in calls if caller_of(call) == owner)
            local.away.discard(owner)

    def _release(self, processes: set[str], unread: tuple[int, ...] = ()) -> None:
        """Stores answers for processes that have left; answers that they may not have read count as not received."""
        self._runtime.local.away.update(processes)
        stored = self._runtime.local.stored_answers
        for process in processes if unread else ():
            stored.discard_read(process, unread)
        stored.release(processes)

    def _on_unread(self, state: UnreadState, asker: Asker[None]) -> None:
        self._runtime.local.stored_answers.discard_read(asker.src, state.unread)

    def _welcome(self, meshes: set[str]) -> p.Welcome:
        local = self._runtime.local
        missed = tuple(
            p.UndeliveredReply(mesh=answer.mesh, rank=answer.rank, endpoint=answer.endpoint, at=answer.at,
                     well=answer.status == Status.VALUE, stored=answer.frames is not None, error=answer.error)
            for answer in local.stored_answers.take_new(meshes)
        )  # fmt: skip
        now, wall = time.monotonic(), time.time()
        running = tuple(
            (cell.mesh, cell.rank, runs[1], wall - (now - runs[2]))
            for cell in tuple(local.cells.values())
            if cell.mesh in meshes and (runs := cell.running) is not None
        )
        actors = tuple(
            p.ActorThere(mesh, rank, incarnation, b"" if cause is None else msgspec.msgpack.encode(cause))
            for (mesh, rank), (incarnation, cause) in self._runtime.latest_actors(meshes).items()
        )
        return p.Welcome(missed, running, actors, self._never_set_up())

    def _results(self, query: WantedResults, asker: Asker[StoredResults]) -> StoredResults:
        stored = self._runtime.local.stored_answers
        stored.forget(query.forget)
        return StoredResults(
            tuple(
                StoredResult(number=answer.number, mesh=answer.mesh, rank=answer.rank, endpoint=answer.endpoint,
                     call=answer.call, index=answer.index, extent=answer.extent, at=answer.at, size=answer.size,
                     stored=answer.frames is not None, error=answer.error)
                for answer in stored.of(query.meshes)
            )
        )  # fmt: skip

    def _result(self, query: WantedResult, asker: Asker[ResultBody]) -> ResultBody:
        frames = self._runtime.local.stored_answers.body(query.number)
        return ResultBody(None if frames is None else tuple(frames))

    def _never_set_up(self) -> bool:
        """Returns whether this process still lacks its set-up."""
        consoles = [cell for cell in tuple(self._runtime.cells.values()) if cell.spec.runs_on is RunsOn.MAIN_THREAD]
        idle = all(not cell.queued() and not cell.calls for cell in consoles)
        return idle and self._registry.started_in is None
