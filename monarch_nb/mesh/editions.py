"""New classes of actor meshes: what holders of references elsewhere learn when a mesh's class is replaced."""

import logging
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.code.modules import Newest
from monarch_nb.host import protocol as p
from monarch_nb.mesh.requests import request, settle
from monarch_nb.runtime import ActorState, Future
from monarch_nb.runtime.endpoint import Kind
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Header, Status, decode, encode, error_line

if TYPE_CHECKING:
    from monarch_nb.mesh.keeper import Keeper
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds; who does not take a new class in that time is not waited for


class _Edition(msgspec.Struct, array_like=True, frozen=True):
    """mesh.class: the class that a mesh has from now on."""

    uid: str
    edition: int
    kind: Kind
    frames: tuple[bytes, ...]


class Editions:
    """Gives the processes that hold references to meshes of this one their new classes, and takes those of others."""

    def __init__(self, keeper: "Keeper") -> None:
        self._keeper = keeper
        self._engine = keeper.engine
        self._newest: dict[str, _Edition] = {}
        self._engine.controls["mesh.class"] = self._arrived

    def publish(self, state: ActorState) -> Future[None]:
        """The mesh has another class now: tells all holders. Resolves when they have taken it, or after a while."""
        with state.lock:
            state.edition += 1
            frames = tuple(bytes(frame) for frame in encode(Newest(state.cls), self._engine))
            told = self._newest[state.uid] = _Edition(state.uid, state.edition, state.kind, frames)
        asked: list[Future[Any]] = [
            request(self._engine, holder, "mesh.class", told) for holder in self._keeper.news.holders(state.uid)
        ]
        done = settle(asked, lambda: f"some processes that refer to {state.name} do not have its new class yet")
        if asked:
            self._engine.later(PATIENCE, lambda: done._set(None))
        return done

    def greet(self, holder: str, uid: str) -> None:
        """Somebody new holds a reference, which may be older than the class."""
        told = self._newest.get(uid)
        if told is not None:
            try:
                self._engine.control(holder, "mesh.class", told)
            except UnreachableError:
                return

    # -- at the holders ---------------------------------------------------------------------------------------------

    def _arrived(self, header: Header, parcel: "Parcel") -> None:
        told = msgspec.msgpack.decode(parcel.frames[0], type=_Edition)
        # Unpickling a class may import what it needs; the reading thread runs no user code.
        threading.Thread(target=self._take, args=(header, told), name="monarch-class", daemon=True).start()

    def _take(self, header: Header, told: _Edition) -> None:
        try:
            state = self._engine.meshes.get(told.uid)
            if isinstance(state, ActorState) and told.edition > state.edition:
                cls = decode(told.frames, self._engine)
                with state.lock:
                    if told.edition > state.edition:
                        state.cls, state.kind, state.edition = cls, told.kind, told.edition
        except Exception as error:
            logger.warning("a reloaded class cannot be used here", exc_info=True)
            self._engine.answer(header, Status.EXCEPTION, p.Refused(error_line(error)))
        else:
            self._engine.answer(header, Status.VALUE, p.Done())
