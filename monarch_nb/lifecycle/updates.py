"""Updates of owners to the holders of references: healed ranks, changed extents, and stops."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from monarch_nb.code.class_versions import ClassVersions
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import request
from monarch_nb.mesh.verbs import STOPPED, SUBSCRIBE, UPDATE, StopUpdate, Subscribe, Update
from monarch_nb.runtime import Future, MeshState, ProcState, Runtime
from monarch_nb.shape import RegionForm
from monarch_nb.supervision import Action, Driver, RankIncarnation, SupervisionMachine
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, Done

PATIENCE = 5.0  # seconds to wait for holders to confirm a heal


class ReferenceUpdates:
    """Records the processes that hold references to meshes owned here, and updates them."""

    def __init__(self, runtime: Runtime, driver: Driver, watcher: ProcessWatcher, versions: ClassVersions) -> None:
        self._runtime, self._driver, self._watcher, self._versions = runtime, driver, watcher, versions
        self._holders = versions.holders
        self._runtime.verbs.handle(SUBSCRIBE, self._subscribe)
        self._runtime.verbs.handle(UPDATE, self._update)
        self._runtime.verbs.handle(STOPPED, self._stopped)

    def forget(self, uid: str) -> None:
        """Forgets the holders of a mesh that was stopped long ago, all of which have been updated."""
        self._holders.pop(uid, None)

    def holders(self, uid: str) -> frozenset[str]:
        """Returns the processes that have subscribed."""
        return frozenset(self._holders.get(uid, ()))

    def subscribe(self, state: MeshState) -> None:
        """Subscribes this process at the owner of a mesh."""
        self._runtime.post(state.owner_process, SUBSCRIBE, Subscribe(state.uid))

    def announce(self, state: MeshState) -> None:
        """Sends the state of a mesh to all holders, without waiting for them."""
        for process in tuple(self._holders.get(state.uid, ())):
            self._send_update(state, process)

    def _send_update(self, state: MeshState, holder: str) -> None:
        try:
            self._runtime.post(holder, UPDATE, self._update_of(state, ()))
        except UnreachableError:
            self._holders[state.uid].discard(holder)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]]) -> None:
        """Sends heals to all holders, and blocks until they confirm."""
        requests: list[tuple[str, str, Future[object]]] = []
        for uid, back in incarnations:
            state = self._runtime.meshes.get(uid)
            if state is None:
                continue
            update = self._update_of(state, tuple(back))
            for process in tuple(self._holders.get(uid, ())):
                requests.append((process, uid, request(self._runtime, process, UPDATE, update)))
        deadline = time.monotonic() + PATIENCE
        for process, uid, future in requests:
            try:
                future.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue  # it receives this heal, and later ones, when it continues
            except Exception:
                self._holders[uid].discard(process)

    def _update_of(self, state: MeshState, back: tuple[RankIncarnation, ...]) -> Update:
        region = RegionForm.of(state.region) if state.resized else None
        hosts = state.layout.hosts if state.resized and isinstance(state, ProcState) else ()
        since = self._driver.since(state.uid)
        return Update(state.uid, state.incarnations, state.version, back, since, region, hosts)

    def stopped(self, state: MeshState, ranks: Sequence[int] | None, reason: str, *, over: bool) -> None:
        """Notifies all holders that a mesh stops, without waiting for them."""
        message = StopUpdate(state.uid, None if ranks is None else tuple(ranks), reason, over)
        for process in tuple(self._holders.get(state.uid, ())):
            try:
                self._runtime.post(process, STOPPED, message)
            except UnreachableError:
                self._holders[state.uid].discard(process)

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _subscribe(self, message: Subscribe, asker: Asker[None]) -> None:
        uid, holder = message.uid, asker.src
        self._holders.setdefault(uid, set()).add(holder)
        state = self._runtime.meshes.get(uid)
        if state is None:
            return
        if state.version:
            self._send_update(state, holder)
        self._versions.greet(holder, uid)
        if state.stopped is not None and not state.detached:
            self._runtime.post(holder, STOPPED, StopUpdate(uid, None, state.stopped, True))

    def _update(self, update: Update, asker: Asker[Done]) -> Done:
        state = self._runtime.meshes.get(update.uid)
        if state is not None:
            region = None if update.region is None else update.region.region
            layout = (
                replace(state.layout, hosts=update.hosts) if update.hosts and isinstance(state, ProcState) else None
            )
            self._runtime.part(MeshRegistry).renew(state, update.incarnations, update.version, region, layout)
            back = update.back or tuple(update.incarnations.items())
            method = "respawned" if isinstance(state, ProcState) else "recreated"

            def follow(machine: SupervisionMachine) -> list[Action]:
                machine.came_after(update.uid, update.since)
                actions: list[Action] = getattr(machine, method)(update.uid, back)
                return actions

            self._driver.feed(follow)
            if isinstance(state, ProcState):
                for rank, _ in back:
                    self._runtime.node.learn(state.layout.host_of(rank))  # it has returned, if it was lost
                    self._watcher.host_back(state.layout.host_of(rank), update.since.get(rank, 0))
                self._watcher.watch(*(state.address(rank) for rank, _ in back))
        return Done()

    def _stopped(self, message: StopUpdate, asker: Asker[None]) -> None:
        state = self._runtime.meshes.get(message.uid)
        if state is None:
            return
        if message.ranks is None:
            state.stopped = message.reason
        self._driver.mark_stopped(state, message.ranks, message.reason, over=message.over)
