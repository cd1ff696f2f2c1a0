"""Actor meshes: references to arrays of actors, and how they are spawned."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from monarch_nb.mesh.endpoint import Endpoint, check_arguments, encode_arguments
from monarch_nb.mesh.requests import RequestError
from monarch_nb.mesh.sending import send_region
from monarch_nb.mesh.stand_ins import stand_ins
from monarch_nb.mesh.undeclared import NotAnEndpoint
from monarch_nb.runtime import (
    SPAWN,
    Actor,
    ActorState,
    EndpointProperty,
    Future,
    Held,
    Instance,
    PendingCall,
    SpawnActor,
    endpoints_of,
    kind_of,
    runtime,
)
from monarch_nb.runtime.features import feature
from monarch_nb.settings import settings
from monarch_nb.shape import MeshTrait, Region
from monarch_nb.supervision import MeshName
from monarch_nb.wire import encode, pickle_failure

if TYPE_CHECKING:
    from monarch_nb.mesh.proc import ProcMesh

A = TypeVar("A")


class ActorMesh(MeshTrait, Generic[A]):
    """A reference to a mesh of actors, or a slice of one: its endpoints are attributes. Cheap to copy and to send."""

    def __init__(self, state: ActorState, region: Region) -> None:
        self._state = state
        self.__region = region

    @property
    def _region(self) -> Region:
        return self.__region

    def _new_with_region(self, region: Region) -> "ActorMesh[A]":
        return ActorMesh(self._state, region)

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # an object that is being unpickled or copied has none yet
            raise AttributeError(name)
        cls = self._state.cls
        declared = _lookup(cls, name)
        if isinstance(declared, EndpointProperty):
            endpoint: Endpoint[..., Any] = Endpoint(self, name, declared)
            self.__dict__[name] = endpoint
            return endpoint
        if name.startswith("__") and name.endswith("__"):  # what Python itself asks for is no method of the actors
            raise AttributeError(name)
        if declared is not None and callable(declared):
            return NotAnEndpoint(self, name, declared)
        if name == "metrics":  # what they have told with `monarch.telemetry.log`; an endpoint of that name goes before
            return feature(runtime(), "metrics").of_mesh(self)
        if name == "logs":  # unless the class has something of that name
            from monarch_nb.logs import logs_of

            return partial(logs_of, self)
        known = ", ".join(sorted(endpoints_of(cls))) or "none"
        raise AttributeError(f"{self._state.name} ({cls.__name__}) has no endpoint {name!r}; it has: {known}")

    @property
    def _class(self) -> type[A]:
        return cast("type[A]", self._state.cls)

    @property
    def initialized(self) -> Future[None]:
        """Resolves once every member's `__init__` has run; fails with SupervisionError if one has raised."""
        born = self._state.born
        return cast(Future[None], born.initialized) if born is not None else Future._resolved(None)

    @property
    def _name(self) -> Future[str]:
        return Future._resolved(MeshName(self._state.name, self._state.uid))

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stops the actors after their current messages; that is no failure. The future resolves when all have."""
        return cast("Future[None]", runtime().keeper.stop_mesh(self._state, reason, self._region))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *endpoints_of(self._state.cls)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorMesh) and self._state.uid == other._state.uid and self._region == other._region

    def __hash__(self) -> int:
        return hash((self._state.uid, self._region))

    def __reduce__(self) -> Any:
        from monarch_nb.mesh.reference import reduce_actor_mesh

        return reduce_actor_mesh(self)

    def __repr__(self) -> str:
        dims = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        told = f", stopped: {self._state.stopped}" if self._state.stopped else ""
        return f"<{self._state.cls.__name__} mesh {self._state.name!r} {{{dims}}}{told}>"


def _lookup(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


class Born:
    """How an actor mesh came to be: enough to re-create any of its ranks with its original arguments."""

    def __init__(self, cls: type, arguments: Held, spec: SpawnActor, instance: Instance) -> None:
        self.cls = cls
        self.arguments = arguments
        self.spec = spec
        self.instance = instance
        self.initialized: Future[None] = Future._resolved(None)

    def let_go(self) -> None:
        """The mesh has stopped: nothing of it is created again."""
        self.arguments = Held(())
        if self.initialized.done() and self.initialized.exception() is None:
            self.initialized = Future._resolved(None)

    def renew(self) -> None:
        """Takes the newest definition of the class. Raises ValueError if that cannot be spawned."""
        from msgspec.structs import replace

        cls = self.newest()
        if cls is not self.cls:
            check_class(cls)
            self.spec = replace(self.spec, kind=kind_of(cls))
            self.cls = cls

    def newest(self) -> type:
        """The class as it is defined now: the cell or module may have been run again since."""
        import sys

        module = sys.modules.get(self.cls.__module__)
        found: Any = module
        for part in self.cls.__qualname__.split("."):
            found = getattr(found, part, None)
        # Another module's class of that name may have been imported over it.
        same = isinstance(found, type) and issubclass(found, Actor) and found.__module__ == self.cls.__module__
        return found if same else self.cls


_RESERVED = frozenset(dir(ActorMesh)) | {"_state"}


def check_class(cls: Any) -> None:
    """Raises ValueError for what cannot be spawned."""
    if not isinstance(cls, type) or not issubclass(cls, Actor):
        raise ValueError(f"{cls!r} cannot be spawned: it must be a class derived from monarch.actor.Actor")
    for name in endpoints_of(cls):
        if name in _RESERVED:
            raise ValueError(
                f"ActorMesh has an attribute that collides with an endpoint name: {cls.__name__}.{name}. "
                "Rename the endpoint"
            )


def send_spawn(state: ActorState, region: Region, frames: list[Any]) -> Future[None]:
    """Sends the spawn message to the ranks of `region`; the future resolves when all are constructed."""
    engine = runtime()
    call = PendingCall(engine, f"{state.name}.__init__", state.uid, region.ranks, len(region), lambda replies: None)
    try:
        send_region(
            engine,
            engine.context(),
            state,
            region,
            SPAWN,
            frames,
            port=call.number,
            call=call.call,
            ordered=False,
        )
    except BaseException:
        call.close()
        raise
    limit = settings.get("actor_spawn_max_idle")
    if limit:
        late = f"{call.title} has not ended within {limit:g} s (actor_spawn_max_idle)"
        engine.later(limit, lambda: None if call.future.done() else call.fail(RequestError(late)))
    return cast(Future[None], call.future)


def spawn_frames(cls: type, arguments: Held, spec: SpawnActor) -> list[Any]:
    """The body of a spawn message."""
    try:
        return [msgspec.msgpack.encode(spec), *encode((cls, arguments), runtime())]
    except Exception as error:
        raise pickle_failure(error, cls, f"the class `{cls.__name__}`") from error


def spawn_actors(
    procs: "ProcMesh", name: str, cls: type[A], args: tuple[Any, ...], kwargs: dict[str, Any], *, where: int = 0
) -> ActorMesh[A]:
    """Spawns one actor on each proc. Does not block: `__init__` runs later, over there, before the first message."""
    cls = stand_ins.get(cls, cls)
    check_class(cls)
    kind = kind_of(cls)
    init: Callable[..., Any] = cls.__init__
    if init is not object.__init__:
        check_arguments(init, 1, f"{cls.__name__}", args, kwargs)
    elif args or kwargs:
        raise TypeError(f"{cls.__name__}() takes no arguments")
    engine = runtime()
    instance = engine.context().actor_instance
    region = procs._region
    arguments = Held(encode_arguments(f"{cls.__name__}()", args, kwargs, init, 1))
    spec = SpawnActor(
        name=name,
        class_name=f"{cls.__module__}.{cls.__qualname__}",
        kind=kind,
        labels=tuple(region.labels),
        offset=region.ndslice.offset,
        sizes=tuple(region.ndslice.sizes),
        strides=tuple(region.ndslice.strides),
        owner=instance.stream,
        owner_process=engine.address,
        creators=instance.lineage,
        where=where,
    )
    frames = spawn_frames(cls, arguments, spec)
    state = ActorState(
        uid=engine.new_uid("a"),
        name=name,
        region=region,
        home=engine.address,
        procs=procs._state,
        cls=cls,
        kind=kind,
        born=Born(cls, arguments, spec, instance),
    )
    try:
        engine.keeper.own(instance, state)
        state.born.initialized = send_spawn(state, region, frames)
        engine.keeper.event("spawning", state)
    except BaseException:  # Ctrl-C too: nobody will ever hold it
        engine.keeper.stop_mesh(state, "its spawn was interrupted")
        raise
    return ActorMesh(state, region)
