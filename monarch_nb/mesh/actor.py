"""Actor meshes: references to arrays of actors."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from monarch_nb.mesh.endpoint import Endpoint, NotAnEndpoint
from monarch_nb.mesh.handle import Handle, form_of, operations
from monarch_nb.mesh.registry import ActorForm, actor_form, actor_record
from monarch_nb.runtime import Actor, ActorState, EndpointProperty, Future, ProcState, endpoints_of, resolved_future
from monarch_nb.shape import Region
from monarch_nb.supervision import MeshName

A = TypeVar("A")


class ActorMesh(Handle[ActorState], Generic[A]):
    """A reference to a mesh of actors, or a slice of one: its endpoints are attributes. Cheap to copy and to send."""

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # an object being unpickled or copied has no record yet
            raise AttributeError(name)
        cls = self._state.cls
        declared = _lookup(cls, name)
        if isinstance(declared, EndpointProperty):
            endpoint: Endpoint[..., object] = Endpoint(self, name, declared)
            self.__dict__[name] = endpoint
            return endpoint
        if name.startswith("__") and name.endswith("__"):  # an attribute that Python itself looks up
            raise AttributeError(name)
        if declared is not None and callable(declared):
            return NotAnEndpoint(self, name, declared)
        if name == "metrics":  # values logged with `monarch.telemetry.log`; an endpoint of that name comes first
            return operations().metrics(self)
        if name == "logs":  # unless the class has an attribute of that name
            return operations().logs(self)
        if name == "detach":  # detaches the actors' processes, with all on them
            return partial(operations().detach, self._state.procs)
        endpoints = ", ".join(sorted(endpoints_of(cls))) or "none"
        raise AttributeError(f"{self._state.name} ({cls.__name__}) has no endpoint {name!r}; it has: {endpoints}")

    @property
    def _class(self) -> type[A]:
        return cast("type[A]", self._state.cls)

    @property
    def initialized(self) -> Future[None]:
        """Resolves once every member's `__init__` has run; fails with SupervisionError if one has raised."""
        spawn_spec = self._state.spawn_spec
        return cast(Future[None], spawn_spec.initialized) if spawn_spec is not None else resolved_future(None)

    @property
    def _name(self) -> Future[str]:
        return resolved_future(MeshName(self._state.name, self._state.uid))

    @property
    def _proc_mesh(self) -> Handle[ProcState]:
        return operations().procs_of(self)  # torchmonarch's programs look there

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stops the actors after their current messages; that is no failure.

        The future resolves when all have ended; for one of them, at once.
        """
        return operations().stop(self._state, reason, self._region)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *endpoints_of(self._state.cls)})

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (actor_form(self._state), form_of(self))

    def __repr__(self) -> str:
        return f"<{self._state.cls.__name__} mesh {self._shown()}>"


def _lookup(cls: type, name: str) -> object:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


_RESERVED = frozenset(dir(ActorMesh)) | {"_state"}


def init_of(cls: type) -> Callable[..., object]:
    """Returns the `__init__` of a class of actors."""
    init: Callable[..., object] = cls.__init__  # type: ignore[misc]
    return init


def check_class(cls: object) -> None:
    """Raises ValueError for a class that cannot be spawned."""
    if not isinstance(cls, type) or not issubclass(cls, Actor):
        raise ValueError(f"{cls!r} cannot be spawned: it must be a class derived from monarch.actor.Actor")
    for name in endpoints_of(cls):
        if name in _RESERVED:
            raise ValueError(
                f"ActorMesh has an attribute that collides with an endpoint name: {cls.__name__}.{name}. "
                "Rename the endpoint"
            )


def _rebuilt(form: ActorForm, region: Region | None) -> ActorMesh[Any]:
    state = actor_record(form)
    return ActorMesh(state, state.region if region is None else region)
