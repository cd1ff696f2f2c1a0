"""Controllers: actors that exist once per program, by name, in its client process."""

import logging
import threading
from typing import TYPE_CHECKING, TypeVar, cast

from monarch_nb._deferred import asyncio
from monarch_nb.code.reload import reload_mesh
from monarch_nb.mesh import verbs
from monarch_nb.mesh.actor import ActorMesh, check_class
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Actor, Future, Runtime, concurrent_endpoint, current, current_runtime
from monarch_nb.settings import settings
from monarch_nb.wire import Asker, Done, decode, encode

if TYPE_CHECKING:
    from monarch_nb.supervision import MeshFailure

A = TypeVar("A")
logger = logging.getLogger(__name__)


class Registry(Actor):
    """Owns the controllers. One that fails is forgotten, and spawned again at the next request; others live on."""

    def __init__(self) -> None:
        self._actors: dict[str, ActorMesh[Actor]] = {}
        self._busy: dict[str, asyncio.Lock] = {}

    @concurrent_endpoint
    async def get_or_spawn(
        self, name: str, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> ActorMesh[Actor]:
        """Returns the controller of that name, spawning it if there is none."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            controller = self._actors.get(name)
            if controller is None or _has_ended(controller):
                return await self._spawn(name, cls, args, kwargs)
            if state_of(controller).cls is not cls:
                await self._renew(name, controller, cls)
            return controller

    async def _spawn(
        self, name: str, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> ActorMesh[Actor]:
        controller: ActorMesh[Actor] = current_runtime().this_proc().spawn(name, cls, *args, **kwargs)
        try:
            await controller.initialized
        except BaseException:
            controller.stop("its __init__ failed")
            raise
        self._actors[name] = controller
        return controller

    async def _renew(self, name: str, controller: ActorMesh[Actor], cls: type) -> None:
        old = state_of(controller).cls
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            logger.warning("the controller %r is a %s, and is not replaced by the %s that was asked for",
                           name, old.__qualname__, cls.__qualname__)  # fmt: skip
            return
        logger.info("the controller %r takes over the newest definition of %s", name, cls.__qualname__)
        await reload_mesh(controller, cls)

    def __supervise__(self, failure: "MeshFailure") -> bool:
        for name, controller in tuple(self._actors.items()):
            if state_of(controller).uid == failure.mesh_uid:
                del self._actors[name]
                logger.warning("the controller %r has failed; the next who asks gets a new one:\n%s",
                               name, failure.report())  # fmt: skip
        return True


def _has_ended(controller: ActorMesh[Actor]) -> bool:
    """Returns whether a controller has been stopped, or has just failed."""
    state, runtime = state_of(controller), current_runtime()
    cell = runtime.cells.get((state.uid, region_of(controller).ranks()[0]))
    return state.stopped is not None or cell is None or cell.cause is not None


def _is_stopped(registry: Registry) -> bool:
    return state_of(cast("ActorMesh[Registry]", registry)).stopped is not None


class Controllers:
    """Finds the registry, which lives in the client's process, and remembers it."""

    def __init__(self, runtime: Runtime, registry: MeshRegistry) -> None:
        self._runtime, self._registry = runtime, registry
        self._lock = threading.Lock()
        self._actor: Registry | None = None
        runtime.verbs.handle(verbs.FIND_CONTROLLERS, self._on_find)

    def registry(self) -> Registry:
        """Returns a reference to the registry; a new one after it was stopped, as by `%stop --all`.

        Blocks for an answer of the client's process when it is first needed in another one.
        """
        with self._lock:
            if self._actor is None or _is_stopped(self._actor):
                self._actor = self._find() if self._owner else self._spawn()
            return self._actor

    @property
    def _owner(self) -> str:
        """The process that has started this one; empty in the client's."""
        return self._registry.started_by

    def _spawn(self) -> Registry:
        token = current.set(self._runtime.root_context)  # the client owns it, whichever actor asks
        try:
            procs: ProcMesh = self._runtime.this_proc()
            return procs.spawn("controllers", Registry)
        finally:
            current.reset(token)

    def _find(self) -> Registry:
        process = self._owner
        while True:
            reply = request(self._runtime, process, verbs.FIND_CONTROLLERS, Done())
            answer = reply.get(settings.message_delivery_timeout)
            if answer.frames:
                mesh: Registry = decode([bytearray(frame) for frame in answer.frames], self._runtime)
                return mesh
            process = answer.ask

    def _on_find(self, _: Done, asker: Asker[verbs.ControllersReply]) -> verbs.ControllersReply | None:
        if self._owner:
            return verbs.ControllersReply(ask=self._owner)

        def answer() -> None:  # spawning it would block the reading thread
            frames = tuple(bytes(frame) for frame in encode(self.registry(), self._runtime))
            asker.reply(verbs.ControllersReply(frames))

        threading.Thread(target=answer, name="monarch-controllers", daemon=True).start()
        return None


def get_or_spawn_controller(name: str, Class: type[A], *args: object, **kwargs: object) -> Future[A]:  # noqa: N803
    """Returns the one actor of that name in the client process of this program, spawned at the first request.

    `args` are used only then. If it is requested with a newer definition of its class, it adopts that and keeps its
    state; after it has failed, it is spawned again. The future fails with the error of its `__init__`. Works from any
    actor.
    Raises ValueError for a class that cannot be spawned.
    """
    check_class(Class)
    registry = current_runtime().part(Controllers).registry()
    return cast("Future[A]", registry.get_or_spawn.call_one(name, Class, args, kwargs))
