"""New classes of actor meshes, sent to processes that hold references when a mesh's class is replaced."""

import logging
import threading

from monarch_nb.code.modules import Newest
from monarch_nb.mesh.requests import request, settle
from monarch_nb.mesh.verbs import NEW_CLASS, NewClass
from monarch_nb.runtime import ActorState, Future, Runtime, resolve_future
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, Done, decode, encode, error_line

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds to wait for holders


class ClassVersions:
    """Sends new classes of this process's meshes to holders of references, and applies received ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.holders: dict[str, set[str]] = {}  # the processes that hold references to a mesh, by its uid
        self._newest: dict[str, NewClass] = {}
        self._runtime.verbs.handle(NEW_CLASS, self._arrived)

    def publish(self, state: ActorState) -> Future[None]:
        """Sends the new class of a mesh to all holders. Resolves when they have it, or after `PATIENCE`."""
        with state.lock:
            state.edition += 1
            frames = tuple(bytes(frame) for frame in encode(Newest(state.cls), self._runtime))
            message = self._newest[state.uid] = NewClass(state.uid, state.edition, state.kind, frames)
        requests: list[Future[object]] = [
            request(self._runtime, holder, NEW_CLASS, message) for holder in tuple(self.holders.get(state.uid, ()))
        ]
        done = settle(requests, lambda: f"some processes that refer to {state.name} do not have its new class yet")
        if requests:
            self._runtime.later(PATIENCE, lambda: resolve_future(done, None))
        return done

    def greet(self, holder: str, uid: str) -> None:
        """Sends a new holder the current class, since its reference may be older."""
        message = self._newest.get(uid)
        if message is not None:
            try:
                self._runtime.post(holder, NEW_CLASS, message)
            except UnreachableError:
                return

    # -- at the holders ---------------------------------------------------------------------------------------------

    def _arrived(self, message: NewClass, asker: Asker[Done]) -> None:
        # Unpickling a class may import what it needs; the reading thread runs no user code.
        threading.Thread(target=self._take, args=(message, asker), name="monarch-class", daemon=True).start()

    def _take(self, message: NewClass, asker: Asker[Done]) -> None:
        try:
            state = self._runtime.meshes.get(message.uid)
            if isinstance(state, ActorState) and message.edition > state.edition:
                cls = decode(message.frames, self._runtime)
                with state.lock:
                    if message.edition > state.edition:
                        state.cls, state.kind, state.edition = cls, message.kind, message.edition
        except Exception as error:
            logger.warning("a reloaded class cannot be used here", exc_info=True)
            asker.refuse(error_line(error))
        else:
            asker.reply(Done())
