"""Spawning actors: from a class and its arguments to messages for processes, at first and again in a heal."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.mesh.actor import ActorMesh, check_class, init_of
from monarch_nb.mesh.handle import Handle, operations, region_of, state_of
from monarch_nb.mesh.mesh_events import MeshEvents, MeshStarting
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError
from monarch_nb.mesh.sending import HeldByRanksError, check_arguments, encode_arguments, send_region
from monarch_nb.runtime import (
    SPAWN,
    Actor,
    ActorState,
    EncodedObject,
    Future,
    Instance,
    PendingCall,
    ProcState,
    SpawnActor,
    current_runtime,
    kind_of,
    resolved_future,
)
from monarch_nb.settings import settings
from monarch_nb.shape import Region, RegionForm
from monarch_nb.wire import OutFrame, encode, name_text, pickle_failure


class ActorSpawnSpec:
    """The definition of an actor mesh, enough to re-create any of its ranks with its original arguments."""

    def __init__(self, cls: type, arguments: EncodedObject, spec: SpawnActor, instance: Instance) -> None:
        self.cls = cls
        self.arguments = arguments
        self.spec = spec
        self.instance = instance
        self.initialized: Future[None] = resolved_future(None)

    def release(self) -> None:
        """Drops data that only a re-creation needs, once the mesh has stopped."""
        self.arguments = EncodedObject(())
        if self.initialized.done() and self.initialized.exception() is None:
            self.initialized = resolved_future(None)

    def renew(self) -> None:
        """Adopts the newest definition of the class. Raises ValueError if it cannot be spawned."""
        cls = self.newest()
        if cls is not self.cls:
            check_class(cls)
            self.spec = msgspec.structs.replace(self.spec, kind=kind_of(cls))
            self.cls = cls

    def newest(self) -> type:
        """Returns the class as it is defined now: its cell or module may have been run again since."""
        definition: Any = sys.modules.get(self.cls.__module__)
        for part in self.cls.__qualname__.split("."):
            definition = getattr(definition, part, None)
        if not isinstance(definition, type) or not issubclass(definition, Actor):
            return self.cls
        # Another module's class of that name may have been imported over it.
        return definition if definition.__module__ == self.cls.__module__ else self.cls


def send_spawn(state: ActorState, region: Region, frames: Sequence[OutFrame]) -> Future[None]:
    """Sends the spawn message to the ranks of `region`; the future resolves when all are constructed."""
    runtime = current_runtime()
    call = PendingCall(runtime, f"{state.name}.__init__", state.uid, region.ranks, len(region), lambda replies: None)
    try:
        send_region(runtime, runtime.context(), state, region, SPAWN, frames, pending=call, ordered=False)
    except BaseException:
        call.close()
        raise
    limit = settings.actor_spawn_max_idle
    if limit:
        reason = f"{call.title} has not ended within {limit:g} s (actor_spawn_max_idle)"
        runtime.later(limit, lambda: None if call.future.done() else call.fail(RequestError(reason)))
    return call.future


def spawn_frames(cls: type, arguments: EncodedObject, spec: SpawnActor) -> list[OutFrame]:
    """Builds the body of a spawn message."""
    runtime = current_runtime()
    breakpoints = runtime.wanted_breakpoints()
    if breakpoints:
        spec = msgspec.structs.replace(spec, debug=breakpoints)
    try:
        return [msgspec.msgpack.encode(spec), *encode((cls, arguments), runtime)]
    except Exception as error:
        failure = error
    raise pickle_failure(failure, cls, f"the class `{cls.__name__}`")


def spawn_actors(
    procs: Handle[ProcState], name: str, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
) -> ActorMesh[Any]:
    """Spawns one actor on each process. Does not block: `__init__` runs there later, before the first message."""
    cls = stand_ins.get(cls, cls)
    check_class(cls)
    if not isinstance(name, str):
        raise TypeError(f"spawn: the name of {cls.__name__} must be a str, not {name!r}")
    name = name_text(name)
    kind = kind_of(cls)
    init = init_of(cls)
    if init is not object.__init__:
        check_arguments(init, 1, f"{cls.__name__}", args, kwargs)
    elif args or kwargs:
        raise TypeError(f"{cls.__name__}() takes no arguments")
    runtime = current_runtime()
    instance = runtime.context().actor_instance
    region = region_of(procs)
    try:
        encoded = encode_arguments(f"{cls.__name__}()", args, kwargs, init, 1)
    except HeldByRanksError:
        encoded = operations().frames_by_rank(procs, f"{cls.__name__}()", args, kwargs)
    arguments = EncodedObject(encoded)
    spec = SpawnActor(
        name=name,
        class_name=class_name(cls),
        kind=kind,
        region=RegionForm.of(region),
        owner=instance.stream,
        owner_process=runtime.address,
        creators=instance.lineage,
    )
    frames = spawn_frames(cls, arguments, spec)
    birth = ActorSpawnSpec(cls, arguments, spec, instance)
    state = ActorState(
        uid=runtime.new_uid("a"),
        name=name,
        region=region,
        owner_process=runtime.address,
        procs=state_of(procs),
        cls=cls,
        kind=kind,
        spawn_spec=birth,
    )
    try:
        runtime.part(MeshRegistry).own(instance, state)
        birth.initialized = send_spawn(state, region, frames)
        runtime.part(MeshEvents).publish(MeshStarting(state))
    except BaseException:  # Ctrl-C too: no reference will ever exist
        runtime.part(MeshStopper).stop(state, "its spawn was interrupted")
        raise
    return ActorMesh(state, region)


stand_ins: dict[type, type] = {}
"""Stand-ins by requested class; for this process, and for processes that it spawns from now on."""


tensor_engines: dict[type, Callable[[ProcMesh], object]] = {}
"""Functions that create the mesh for actors of a class in `activate`; for the same processes."""


def simulated_mesh(procs: Handle[ProcState]) -> Any:
    """Returns a mesh of simulated ranks, with the dimensions of these processes."""
    return operations().simulated_mesh(procs)


def class_name(cls: type) -> str:
    """Returns the name of an actor's class, as in `Instance.class_name`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def tensor_engine_of(name: str | None) -> Callable[[ProcMesh], object] | None:
    """Returns the function in `tensor_engines` for a class by its name: in other processes it may be a copy."""
    return next((engine for cls, engine in tuple(tensor_engines.items()) if class_name(cls) == name), None)


class SetUp:
    """The set-up of new processes: sets stand-ins for classes and tensor meshes, then runs the user's set-up."""

    def __init__(self, bootstrap: Callable[[], object] | None) -> None:
        self._classes, self._engines = dict(stand_ins), dict(tensor_engines)
        self._bootstrap = bootstrap

    def __call__(self) -> object:
        """Returns the result of the user's set-up, which may be a coroutine."""
        stand_ins.update(self._classes)
        tensor_engines.update(self._engines)
        return None if self._bootstrap is None else self._bootstrap()


def with_stand_ins(bootstrap: Callable[[], object] | None) -> Callable[[], object] | None:
    """Returns the set-up for processes that are spawned now."""
    return SetUp(bootstrap) if stand_ins or tensor_engines else bootstrap
