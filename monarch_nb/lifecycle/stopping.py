"""Stopping meshes, or slices of them, in order: not a failure."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs as host_verbs
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.lifecycle.watching import forget
from monarch_nb.mesh.mesh_events import Event, MeshStopped, MeshStopping
from monarch_nb.mesh.requests import UnansweredError, gather, request, settle
from monarch_nb.mesh.verbs import STOP_ACTOR, STOP_MESH, ActorGone, StopActor, StopMeshRequest
from monarch_nb.runtime import (
    ActorCell,
    ActorState,
    Future,
    Instance,
    MeshState,
    ProcState,
    Runtime,
    pending_future,
    resolve_future,
    resolved_future,
    when_done,
)
from monarch_nb.settings import settings
from monarch_nb.shape import Region, places_of
from monarch_nb.supervision import Driver
from monarch_nb.transport import UnreachableError, held_back
from monarch_nb.wire import Asker, Done, agent_of, parse_address

logger = logging.getLogger(__name__)
MOST_STOPPED = 64  # number of stopped meshes whose state is retained


class MeshStopper:
    """Stops meshes of this process, and has the owners of other meshes stop theirs."""

    def __init__(
        self,
        runtime: Runtime,
        driver: Driver,
        updates: ReferenceUpdates,
        *,
        disown: Callable[[MeshState, Sequence[str]], None],
        publish: Callable[[Event], None],
    ) -> None:
        """`disown` forgets a mesh that was stopped long ago; `publish` takes events for displays."""
        self._runtime, self._driver, self._updates = runtime, driver, updates
        self._disown, self._publish = disown, publish
        self._stops: dict[str, Future[None]] = {}
        self._former: deque[MeshState] = deque()
        self._forgetting = threading.Lock()
        self._runtime.verbs.handle(STOP_ACTOR, self._stop_actor)
        self._runtime.verbs.handle(STOP_MESH, self._on_stop)

    def stop(self, state: MeshState, reason: str, region: Region | None = None) -> Future[None]:
        """Stops a mesh or slice; the future resolves when it has ended. A second stop returns the same future.

        An actor that ends with it gets a resolved future: the stop waits for the end of its present message.
        Raises RuntimeError for a mesh that this process has left, which may be another one's by now.
        """
        first = self._stops.get(state.uid)
        if first is not None:
            return first
        if state.detached:
            raise RuntimeError(state.end_text)
        full = region is None or set(state.ranks) <= set(region.ranks())  # the mesh it was sliced from may have shrunk
        ranks = None if full or region is None else tuple(region.ranks())
        if state.owner_process != self._runtime.address:
            return self._ask(state, ranks, reason)
        if state.uid not in self._runtime.meshes:
            return resolved_future(None)  # forgotten long ago, or interrupted before it was registered
        if isinstance(state, ProcState) and state.spawn_spec is None:
            raise RuntimeError("this process cannot stop itself: stop the actors on it, or leave by shutdown_context()")
        return held_back(self._stop, state, ranks, reason)

    def stop_by_uid(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh by its uid; the future is resolved if the mesh no longer exists."""
        state = self._runtime.meshes.get(uid)
        return resolved_future(None) if state is None or state.detached else self.stop(state, reason)

    def stop_again(self, state: MeshState) -> None:
        """Stops incarnations of a stopped mesh that have started after its stop."""
        assert state.stopped is not None
        ended = self._stop_ranks(state, state.ranks, state.stopped)
        when_done(ended, lambda _: self._driver.mark_stopped(state, None, state.stopped or "", over=True))

    def await_all(self, uids: Sequence[str], owner: Instance) -> None:
        """Stops the meshes of an ending actor, the newest first, and blocks until they have ended, within limits."""
        states = [self._runtime.meshes[uid] for uid in reversed(uids) if uid in self._runtime.meshes]
        futures = [(state, self.stop(state, f"its owner {owner} ended")) for state in states if not state.detached]
        limit = max(settings.stop_actor_timeout, settings.mesh_terminate_timeout)
        deadline = time.monotonic() + limit + 5
        for state, future in futures:
            try:
                future.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                logger.warning("%s did not stop in time", state.name)

    def leave(self, reason: str, seconds: float) -> None:
        """Stops all processes that this one has spawned, at its end; after `seconds` they are killed."""
        states = [
            s for s in tuple(self._runtime.meshes.values()) if isinstance(s, ProcState) and s.spawn_spec is not None
        ]
        stops = []
        for state in states:
            if state.stopped is None and state.owner_process == self._runtime.address:
                self._driver.mark_stopped(state, None, reason, over=False)
                state.stopped = reason
                stops.append(self._stop_procs(state, state.ranks, reason, seconds))
        deadline = time.monotonic() + seconds + 1
        for future in stops:
            try:
                future.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return  # their agents end next, and the processes with them

    def _stop(self, state: MeshState, ranks: tuple[int, ...] | None, reason: str) -> Future[None]:
        future: Future[None] = pending_future(describe=lambda: f"{state.name} has not stopped yet")
        if ranks is None:
            self._stops[state.uid] = future
        self._driver.mark_stopped(state, ranks, reason, over=False)
        if ranks is None:
            with state.lock:  # a heal either sees it, or has announced the incarnations that end with it
                state.stopped = reason
        self._updates.stopped(state, ranks, reason, over=False)
        stop = self._stop_ranks(state, state.ranks if ranks is None else ranks, reason)
        self._publish(MeshStopping(state))

        def done(_: Future[object]) -> None:
            try:
                self._driver.mark_stopped(state, ranks, reason, over=True)
                if ranks is None:
                    self._release_specs(state)
                self._updates.stopped(state, ranks, reason, over=True)
                self._publish(MeshStopped(state))
                if ranks is None:
                    self._forget_formers(state)
            finally:
                resolve_future(future, None)

        def finish(reply: Future[object]) -> None:
            if self._runtime.closed:  # no messages are read any more
                done(reply)
            else:
                self._runtime.node.settled(done, reply)  # after earlier replies

        when_done(stop, finish)
        return future

    def _release_specs(self, state: MeshState) -> None:
        """Releases the spawn arguments of a stopped mesh and of the actors that stopped with it."""
        for mesh in (state, *(state.actors.values() if isinstance(state, ProcState) else ())):
            if mesh.spawn_spec is not None:
                mesh.spawn_spec.release()
            self._runtime.root.outbox.forget(mesh.uid)

    def _forget_formers(self, stopped: MeshState) -> None:
        """Deletes the records of meshes that stopped earlier: a notebook may spawn meshes for weeks."""
        with self._forgetting:  # several threads may complete a stop
            self._former.append(stopped)
            formers = [self._former.popleft() for _ in range(len(self._former) - MOST_STOPPED)]
        for former in formers:
            meshes = (former, *(former.actors.values() if isinstance(former, ProcState) else ()))
            for mesh in meshes:
                self._runtime.meshes.pop(mesh.uid, None)
                self._stops.pop(mesh.uid, None)
            if isinstance(former, ActorState):
                former.procs.actors.pop(former.uid, None)
            self._disown(former, [mesh.uid for mesh in meshes])

    def _stop_ranks(self, state: MeshState, ranks: Sequence[int], reason: str) -> Future[None]:
        if isinstance(state, ProcState):
            return self._stop_procs(state, ranks, reason)
        assert isinstance(state, ActorState)
        return self._stop_actors(state, ranks, reason)

    def _stop_procs(
        self, state: ProcState, ranks: Sequence[int], reason: str, seconds: float | None = None
    ) -> Future[None]:
        limit = settings.mesh_terminate_timeout if seconds is None else seconds
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(state.layout.host_of(rank), []).append(state.address(rank))
        replies: list[Future[p.StopReply]] = []
        for host, addresses in by_host.items():
            body = p.Stop(tuple(addresses), timeout_s=limit, reason=reason)
            replies.append(request(self._runtime, agent_of(host), host_verbs.STOP, body))
            when_done(replies[-1], self._forget)
        return settle(replies, lambda: f"{state.name} has not stopped yet")

    def _forget(self, future: Future[p.StopReply]) -> None:
        if (error := future.exception(0)) is None:
            for end in future.get(0).exits:
                forget(self._runtime, end)
        elif not isinstance(error, UnansweredError):
            logger.warning("not stopped: %s", error)

    def _stop_actors(self, state: ActorState, ranks: Sequence[int], reason: str) -> Future[None]:
        replies: dict[int, Future[ActorGone]] = {}
        failed = self._driver.failed(state.uid)
        for rank in ranks:
            if rank not in failed:
                message = StopActor(state.uid, rank, state.incarnation(rank), reason)
                replies[rank] = request(self._runtime, state.procs.address(rank), STOP_ACTOR, message)
        stop = settle(list(replies.values()), lambda: f"{state.name} has not stopped yet")
        when_done(stop, lambda _: self._log_unfinished(state, replies))
        return stop

    @staticmethod
    def _log_unfinished(state: ActorState, replies: "dict[int, Future[ActorGone]]") -> None:
        """Logs ranks that have not ended, grouped by the code that they execute."""
        unfinished: dict[str, list[int]] = {}
        for rank, future in replies.items():
            if future.exception(0) is None and (work := future.get(0).left_in):
                unfinished.setdefault(work, []).append(rank)
        for work, ranks in unfinished.items():
            logger.warning(
                "%s was stopped, but %s%s on %s did not end, and an interrupt did not help. It gets no more "
                "messages, and ends when its process does: %s.stop() ends that", state.name,
                "" if work.startswith("endpoint") else "its ", work, places_of(state.region, ranks) or "its rank",
                state.procs.name,
            )  # fmt: skip

    def _ask(self, state: MeshState, ranks: tuple[int, ...] | None, reason: str) -> Future[None]:
        self._driver.mark_stopped(state, ranks, reason, over=False)
        message = StopMeshRequest(state.uid, ranks, reason)
        if self._stops_caller(state, ranks):
            self._runtime.post(state.owner_process, STOP_MESH, message)
            return resolved_future(None)
        reply = request(self._runtime, state.owner_process, STOP_MESH, message)
        return gather([reply], lambda: f"{state.name} has not stopped yet")

    def _stops_caller(self, state: MeshState, ranks: tuple[int, ...] | None) -> bool:
        """Returns whether the calling actor ends with these ranks, for which it would wait for ever."""
        cell = self._runtime.context().actor_instance.cell
        if not isinstance(cell, ActorCell):
            return False
        uid, rank, _ = parse_address(self._runtime.address).place
        if isinstance(state, ActorState):
            uid, rank = cell.mesh, cell.rank
        return uid == state.uid and (ranks is None or rank in ranks)

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _on_stop(self, body: StopMeshRequest, asker: Asker[Done]) -> None:
        state = self._runtime.meshes.get(body.uid)
        if state is None or state.detached:
            asker.refuse(f"there is no mesh {body.uid} here" if state is None else state.end_text)
            return
        first = self._stops.get(state.uid)
        future = first if first is not None else self._stop(state, body.ranks, body.reason)

        def reply(_: Future[None]) -> None:
            with contextlib.suppress(UnreachableError):  # the asker may have ended meanwhile
                asker.reply(Done())

        when_done(future, reply)

    def _stop_actor(self, body: StopActor, asker: Asker[ActorGone]) -> ActorGone | None:
        cell = self._runtime.cells.get((body.mesh, body.rank))
        if cell is None or cell.incarnation != body.incarnation:
            return ActorGone()
        cell.on_end(lambda: asker.reply(ActorGone(cell.left_in)))
        cell.stop(body.reason)
        self._runtime.later(cell.cleanup.patience, lambda: self._interrupt_overdue(cell))
        return None

    def _interrupt_overdue(self, cell: ActorCell) -> None:
        """Interrupts a stopped actor whose time is over, and gives it up if that has no effect either."""
        wait = cell.cleanup.interrupt_overdue()
        if wait is not None:
            self._runtime.later(wait, lambda: self._interrupt_overdue(cell))
