"""What owners let the holders of references know: which ranks were healed, and what has stopped."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.host import protocol as p
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, MeshState, ProcState
from monarch_nb.supervision import Life
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Header, Status

if TYPE_CHECKING:
    from monarch_nb.mesh.keeper import Keeper
    from monarch_nb.transport import Parcel

PATIENCE = 5.0  # seconds; holders that do not take note of a heal in that time are not waited for


class _Update(msgspec.Struct, array_like=True, frozen=True):
    """mesh.update: what a heal has changed."""

    uid: str
    incarnations: dict[int, int]
    version: int
    lives: tuple[Life, ...]


class _Stopped(msgspec.Struct, array_like=True, frozen=True):
    """mesh.stopped: a mesh, or some of its ranks, stop, or have stopped once it is `over`."""

    uid: str
    ranks: tuple[int, ...] | None
    reason: str
    over: bool


class News:
    """Knows which processes hold references to the meshes that are owned here, and tells them."""

    def __init__(self, keeper: "Keeper") -> None:
        self._keeper = keeper
        self._engine = keeper.engine
        self._holders: dict[str, set[str]] = {}
        self._engine.controls.update(
            {"mesh.subscribe": self._subscribe, "mesh.update": self._update, "mesh.stopped": self._stopped}
        )

    def holders(self, uid: str) -> tuple[str, ...]:
        """The processes that hold references to a mesh."""
        return tuple(self._holders.get(uid, ()))

    def forget(self, uid: str) -> None:
        """A mesh was stopped long ago, as all who hold references have been told."""
        self._holders.pop(uid, None)

    def subscribe(self, state: MeshState) -> None:
        """Have the owner of a mesh tell this process."""
        self._engine.control(state.home, "mesh.subscribe", state.uid)

    def healed(self, lives: Sequence[tuple[str, Sequence[Life]]]) -> None:
        """Tells everybody who holds a reference, and blocks until they know."""
        asked: list[tuple[str, str, Future[Any]]] = []
        for uid, back in lives:
            state = self._engine.meshes.get(uid)
            if state is None:
                continue
            update = _Update(uid, state.incarnations, state.version, tuple(back))
            for process in tuple(self._holders.get(uid, ())):
                asked.append((process, uid, request(self._engine, process, "mesh.update", update)))
        until = time.monotonic() + PATIENCE
        for process, uid, future in asked:
            try:
                future.get(max(0.0, until - time.monotonic()))
            except TimeoutError:
                continue  # it hears of this heal when it goes on, and of the next
            except Exception:
                self._holders[uid].discard(process)

    def stopped(self, state: MeshState, ranks: Sequence[int] | None, reason: str, *, over: bool) -> None:
        """Tells everybody who holds a reference that it stops; waits for nobody."""
        told = _Stopped(state.uid, None if ranks is None else tuple(ranks), reason, over)
        for process in tuple(self._holders.get(state.uid, ())):
            try:
                self._engine.control(process, "mesh.stopped", told)
            except UnreachableError:
                self._holders[state.uid].discard(process)

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _subscribe(self, header: Header, parcel: "Parcel") -> None:
        uid = msgspec.msgpack.decode(parcel.frames[0], type=str)
        self._holders.setdefault(uid, set()).add(header.src)
        state = self._engine.meshes.get(uid)
        if state is None:
            return
        if state.version:
            update = _Update(uid, state.incarnations, state.version, ())
            self._engine.control(header.src, "mesh.update", update)
        self._keeper.editions.greet(header.src, uid)
        if state.stopped is not None:
            self._engine.control(header.src, "mesh.stopped", _Stopped(uid, None, state.stopped, True))

    def _update(self, header: Header, parcel: "Parcel") -> None:
        update = msgspec.msgpack.decode(parcel.frames[0], type=_Update)
        state = self._engine.meshes.get(update.uid)
        if state is not None:
            state.renew(update.incarnations, update.version)
            lives = update.lives or tuple(update.incarnations.items())
            known = "respawned" if isinstance(state, ProcState) else "recreated"
            self._keeper.driver.feed(lambda machine: getattr(machine, known)(update.uid, lives))
            if isinstance(state, ProcState):
                for rank, _ in lives:
                    self._engine.node.learn(state.layout.host_of(rank))  # it is there again, if it was lost
                self._keeper.watching.watch(*(state.address(rank) for rank, _ in lives))
        self._engine.answer(header, Status.VALUE, p.Done())

    def _stopped(self, header: Header, parcel: "Parcel") -> None:
        told = msgspec.msgpack.decode(parcel.frames[0], type=_Stopped)
        state = self._engine.meshes.get(told.uid)
        if state is None:
            return
        if told.ranks is None:
            state.stopped = told.reason
        self._keeper.stops.mark(state, told.ranks, told.reason, over=told.over)
