"""Methods of an actor class without `@endpoint`: what they are on a mesh, and how they are called all the same."""

import inspect
from collections.abc import Callable
from typing import Concatenate, Literal, NoReturn, ParamSpec, TypeVar, overload

from monarch_nb.mesh.endpoint import Endpoint
from monarch_nb.mesh.handle import Handle
from monarch_nb.runtime import ActorState, AnyEndpoint, EndpointProperty, Port, undeclared_name

P = ParamSpec("P")
R = TypeVar("R")


class NotAnEndpoint:
    """A method that is not marked with `@endpoint`. Only `as_endpoint` can do anything with it."""

    def __init__(self, mesh: Handle[ActorState], name: str, method: Callable[..., object]) -> None:
        self._mesh = mesh
        self._name = name
        self._method = method

    def _refuse(self) -> NoReturn:
        state = self._mesh._state
        raise RuntimeError(
            f"{state.cls.__name__}.{self._name} is not annotated as an endpoint. To call it as one, add a @endpoint "
            f"decorator to its definition, or use as_endpoint({state.name}.{self._name})"
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuses, and says what to do instead."""
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self._mesh._state.name}.{self._name}, not an endpoint>"


@overload
def as_endpoint(
    not_an_endpoint: Callable[P, R], *, propagate: object = None, explicit_response_port: Literal[False] = False
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    not_an_endpoint: Callable[Concatenate[Port[R], P], None],
    *,
    propagate: object = None,
    explicit_response_port: Literal[True],
) -> Endpoint[P, R]: ...
def as_endpoint(not_an_endpoint: object, *, propagate: object = None, explicit_response_port: bool = False) -> object:
    """A method of a spawned actor without `@endpoint`, as an endpoint: `as_endpoint(mesh.method).call(...)`.

    Raises ValueError for anything else, TypeError for an `async def` of an actor whose endpoints are all `def`.
    """
    if isinstance(not_an_endpoint, Endpoint):
        raise ValueError(f"{not_an_endpoint._title} is an endpoint already")
    if not isinstance(not_an_endpoint, NotAnEndpoint):
        raise ValueError(f"as_endpoint wants a method of a spawned actor (mesh.method), not {not_an_endpoint!r}")
    mesh, method = not_an_endpoint._mesh, not_an_endpoint._method
    if mesh._state.kind == "sync" and inspect.iscoroutinefunction(method):
        raise TypeError(
            f"{mesh._state.cls.__name__}.{not_an_endpoint._name} is `async def`, but the actor's endpoints are all "
            f"`def`: it has no event loop"
        )
    declared: AnyEndpoint = EndpointProperty(
        method, propagator=propagate, explicit_response_port=explicit_response_port
    )
    return Endpoint(mesh, undeclared_name(not_an_endpoint._name, explicit=explicit_response_port), declared)
