"""New classes of actor meshes: what holders of references elsewhere learn when a mesh's class is replaced."""

import logging
import threading
from typing import Any

from monarch_nb.code.modules import Newest
from monarch_nb.mesh.requests import request, settle
from monarch_nb.mesh.verbs import NEW_CLASS, NewClass
from monarch_nb.runtime import ActorState, Future, Runtime, resolve_future
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, Done, decode, encode, error_line

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds; who does not take a new class in that time is not waited for


class ClassVersions:
    """Gives the processes that hold references to meshes of this one their new classes, and takes those of others."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self.holders: dict[str, set[str]] = {}  # the processes that hold references to a mesh, by its uid
        self._newest: dict[str, NewClass] = {}
        self._engine.verbs.handle(NEW_CLASS, self._arrived)

    def publish(self, state: ActorState) -> Future[None]:
        """The mesh has another class now: tells all holders. Resolves when they have taken it, or after a while."""
        with state.lock:
            state.edition += 1
            frames = tuple(bytes(frame) for frame in encode(Newest(state.cls), self._engine))
            told = self._newest[state.uid] = NewClass(state.uid, state.edition, state.kind, frames)
        asked: list[Future[Any]] = [
            request(self._engine, holder, NEW_CLASS, told) for holder in tuple(self.holders.get(state.uid, ()))
        ]
        done = settle(asked, lambda: f"some processes that refer to {state.name} do not have its new class yet")
        if asked:
            self._engine.later(PATIENCE, lambda: resolve_future(done, None))
        return done

    def greet(self, holder: str, uid: str) -> None:
        """Somebody new holds a reference, which may be older than the class."""
        told = self._newest.get(uid)
        if told is not None:
            try:
                self._engine.tell(holder, NEW_CLASS, told)
            except UnreachableError:
                return

    # -- at the holders ---------------------------------------------------------------------------------------------

    def _arrived(self, message: NewClass, asker: Asker[Done]) -> None:
        # Unpickling a class may import what it needs; the reading thread runs no user code.
        threading.Thread(target=self._take, args=(message, asker), name="monarch-class", daemon=True).start()

    def _take(self, message: NewClass, asker: Asker[Done]) -> None:
        try:
            state = self._engine.meshes.get(message.uid)
            if isinstance(state, ActorState) and message.edition > state.edition:
                cls = decode(message.frames, self._engine)
                with state.lock:
                    if message.edition > state.edition:
                        state.cls, state.kind, state.edition = cls, message.kind, message.edition
        except Exception as error:
            logger.warning("a reloaded class cannot be used here", exc_info=True)
            asker.refuse(error_line(error))
        else:
            asker.reply(Done())
