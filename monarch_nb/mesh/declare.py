"""Declarations of actors as type checkers see them: an object of an actor class and a mesh of them in one.

At run time these are the class and decorators of `monarch_nb.runtime`, and nothing else. `spawn` returns a mesh that
has the endpoints of the class as attributes. No type can express that for any class, so the class is declared as both.
"""

from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import Actor as _Actor
from monarch_nb.runtime import concurrent_endpoint as _concurrent_endpoint
from monarch_nb.runtime import endpoint as _endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

    from monarch_nb.mesh.endpoint import Endpoint
    from monarch_nb.runtime import Coro, EndpointProperty, Future, Port
    from monarch_nb.shape import MeshTrait, Region

    P = ParamSpec("P")
    R = TypeVar("R")

    class Actor(MeshTrait, _Actor):
        """An object of this class, and a mesh of them."""

        @property
        def _region(self) -> Region: ...
        def _new_with_region(self, region: Region) -> Self: ...
        @property
        def initialized(self) -> Future[None]:
            """Of a mesh: resolves once every member's `__init__` has run."""

        def stop(self, reason: str = ...) -> Future[None]:
            """Of a mesh: stops the actors after their current messages."""

    class Declared(Generic[P, R]):
        """An endpoint: on a mesh (or object) it has adverbs, on the class it is a declaration."""

        @overload
        def __get__(self, instance: None, owner: type) -> EndpointProperty[P, R]: ...
        @overload
        def __get__(self, instance: object, owner: type) -> Endpoint[P, R]: ...
        def __get__(self, instance: object, owner: type) -> EndpointProperty[P, R] | Endpoint[P, R]: ...

    class _Mark(Protocol):
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], Coro[R]], /) -> Declared[P, R]: ...
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> Declared[P, R]: ...

    class _MarkAsync(Protocol):
        def __call__(self, method: Callable[Concatenate[Any, P], Coro[R]], /) -> Declared[P, R]: ...

    class _MarkPorted(Protocol):
        def __call__(
            self, method: Callable[Concatenate[Any, Port[R], P], Awaitable[None] | None], /
        ) -> Declared[P, R]: ...

    @overload
    def endpoint(method: Callable[Concatenate[Any, P], Coro[R]], /) -> Declared[P, R]: ...
    @overload
    def endpoint(method: Callable[Concatenate[Any, P], R], /) -> Declared[P, R]: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Mark: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _MarkPorted: ...
    def endpoint(*args: object, **options: object) -> object:
        """Marks a method of an `Actor` as callable from elsewhere; one message at a time runs in an actor.

        With `explicit_response_port` the method gets a `Port` as its first argument and answers through it.
        """

    @overload
    def concurrent_endpoint(method: Callable[Concatenate[Any, P], Coro[R]], /) -> Declared[P, R]: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _MarkAsync: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _MarkPorted: ...
    def concurrent_endpoint(*args: object, **options: object) -> object:
        """Like `endpoint`, for `async def` only: its body runs as a task while the actor handles further messages."""

else:
    Actor = _Actor
    endpoint = _endpoint
    concurrent_endpoint = _concurrent_endpoint

__all__ = ["Actor", "concurrent_endpoint", "endpoint"]
