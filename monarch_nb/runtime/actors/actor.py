"""The base class of users' actors, and their endpoints: the methods that may be called from elsewhere."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")
_USER_HOOKS = ("__supervise__", "__cleanup__", "_handle_undeliverable_message")


def _default(method: "Callable[..., object]") -> "Callable[..., object]":
    method._monarch_default = True  # type: ignore[attr-defined]
    return method


class _NoMeshError(NotImplementedError, AttributeError):
    """A member of meshes is asked of an actor itself. An AttributeError too, so that `hasattr` says False."""


def _no_mesh(name: str) -> _NoMeshError:
    return _NoMeshError(f"{name} belongs to the mesh that ProcMesh.spawn returned, not to the actor itself")


class _MeshAttribute:
    """An attribute of meshes: raises NotImplementedError on an actor that has no attribute of that name itself."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> "_MeshAttribute":
        if instance is None:
            return self
        raise _no_mesh(self._name)


class Actor:
    """An object with private state whose `@endpoint` methods are called with messages, one at a time.

    `__init__` runs in the actor's own process and thread, before its first message.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named after the class."""
        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    @_default
    def __supervise__(self, failure: Any) -> bool:
        """Called with a `MeshFailure` when a mesh this actor owns fails. Return True when it is handled."""
        return False

    @_default
    def __cleanup__(self, exc: Exception | None) -> Awaitable[None] | None:
        """Called when the actor stops, after the meshes it owns; `exc` is None for an ordinary stop."""
        return None

    @_default
    def __healed__(self, points: Any) -> None:
        """Called on ranks that survived, between messages, with the points that were re-created by `heal_mesh`."""

    @_default
    def _handle_undeliverable_message(self, message: Any) -> bool | Awaitable[bool]:
        """Called when a message this actor sent could not be delivered. Return True when that is no fault."""
        return False

    # `spawn` is typed as the class, so editors and type checkers offer the members of meshes on actors.

    def slice(self, /, **dims: "Any") -> "Self":
        """On a mesh of such actors: returns some of them. On an actor itself: NotImplementedError."""
        raise _no_mesh("slice()")

    def split(self, /, **splits: "int | Sequence[str]") -> "Self":
        """On a mesh of such actors: splits a dimension into several. On an actor itself: NotImplementedError."""
        raise _no_mesh("split()")

    def flatten(self, name: str) -> "Self":
        """On a mesh of such actors: joins all dimensions into one. On an actor itself: NotImplementedError."""
        raise _no_mesh("flatten()")

    def rename(self, /, **names: str) -> "Self":
        """On a mesh of such actors: changes labels. On an actor itself: NotImplementedError."""
        raise _no_mesh("rename()")

    def size(self, dim: "str | Sequence[str] | None" = None) -> int:
        """On a mesh of such actors: returns their number. On an actor itself: NotImplementedError."""
        raise _no_mesh("size()")

    if not TYPE_CHECKING:  # `monarch_nb.mesh.declare` has their types
        extent, sizes = _MeshAttribute(), _MeshAttribute()
        initialized, stop = _MeshAttribute(), _MeshAttribute()


Coro: TypeAlias = Coroutine[Any, Any, T]
Kind = Literal["sync", "async"]


class EndpointProperty(Generic[P, R]):
    """A method marked as callable from elsewhere; on a mesh it becomes an endpoint with adverbs."""

    def __init__(
        self,
        method: Callable[..., object],
        propagator: object = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        *,
        concurrent: bool = False,
    ) -> None:
        functools.update_wrapper(self, method)
        self.method = self._method = method  # programs of torchmonarch read `_method`
        with contextlib.suppress(AttributeError):  # a callable that is no function may have no room for it
            method._method = method  # type: ignore[attr-defined]  # tests of actors write `actor.step._method(actor)`
        self.propagator = self._propagator = propagator
        self.explicit_response_port = explicit_response_port
        self._explicit_response_port = explicit_response_port or concurrent  # as programs of torchmonarch read it
        self._instrument = instrument
        self._concurrent = concurrent

    @property
    def is_async(self) -> bool:
        """True for `async def` endpoints."""
        return inspect.iscoroutinefunction(self._method)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # On the class: the property itself. On the object: the plain method, so that actors can call their own.
        if instance is None:
            return self
        # Whether a partial function is a descriptor depends on Python's version.
        if isinstance(self._method, functools.partial) or not hasattr(self._method, "__get__"):
            return functools.partial(self._method, instance)
        return self._method.__get__(instance, owner)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the plain method; the first argument is the object."""
        return self._method(*args, **kwargs)


AnyEndpoint: TypeAlias = EndpointProperty[..., object]


@overload
def endpoint(method: Callable[Concatenate[Any, P], Coro[R]], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *, propagate: object = None, explicit_response_port: bool = False, instrument: bool = True
) -> Callable[[Callable[..., object]], AnyEndpoint]: ...
def endpoint(
    method: Callable[..., object] | None = None,
    *,
    propagate: object = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Marks a method of an `Actor` as callable from elsewhere; one message at a time runs in an actor.

    With `explicit_response_port` the method gets a `Port` as its first argument and answers through it.
    """

    def mark(function: Callable[..., object]) -> AnyEndpoint:
        if isinstance(function, EndpointProperty):
            raise ValueError(f"{function._method.__name__} is an endpoint already")
        return EndpointProperty(
            function, propagator=propagate, explicit_response_port=explicit_response_port, instrument=instrument
        )

    return mark if method is None else mark(method)


def concurrent_endpoint(
    method: Callable[..., object] | None = None,
    *,
    propagate: object = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Like `endpoint`, for `async def` only: its body runs as a task while the actor handles further messages."""

    def mark(function: Callable[..., object]) -> AnyEndpoint:
        if isinstance(function, EndpointProperty):
            name = function._method.__name__
            raise ValueError(f"concurrent_endpoint does not wrap @endpoint: {name} takes one of the two")
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"concurrent_endpoint can only wrap async endpoints: {function.__name__} is none")
        return EndpointProperty(
            function,
            propagator=propagate,
            explicit_response_port=explicit_response_port,
            instrument=instrument,
            concurrent=True,
        )

    return mark if method is None else mark(method)


def endpoints_of(cls: type) -> dict[str, AnyEndpoint]:
    """Returns the endpoints of an actor class by name, inherited ones included."""
    endpoints: dict[str, AnyEndpoint] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, EndpointProperty):
                endpoints[name] = value
            else:
                endpoints.pop(name, None)
    return endpoints


def undeclared_name(name: str, *, explicit: bool) -> str:
    """Returns the name in messages of a method that is not marked as an endpoint."""
    return f"@!{name}" if explicit else f"@{name}"


def undeclared(cls: type, name: str) -> AnyEndpoint | None:
    """Returns the method that `undeclared_name` stands for; None for other names."""
    if not name.startswith("@"):
        return None
    method = getattr(cls, name.lstrip("@!"), None)
    return EndpointProperty(method, explicit_response_port=name.startswith("@!")) if callable(method) else None


def _overrides(cls: type, hook: str) -> Callable[..., object] | None:
    method = getattr(cls, hook, None)
    return None if method is None or getattr(method, "_monarch_default", False) else method


def kind_of(cls: type) -> Kind:
    """Returns the kind of an actor class: "sync" runs on a thread of its own, "async" on an event loop of its own.

    Raises ValueError for classes that mix both, or whose `__init__` is a coroutine function.
    """
    name, endpoints = cls.__name__, endpoints_of(cls)
    if inspect.iscoroutinefunction(_overrides(cls, "__init__")):
        raise ValueError(f"{name} has an async __init__, which nobody awaits: make it `def`, and await in an endpoint")
    asynchronous = [name for name, ep in endpoints.items() if ep.is_async]
    synchronous = [name for name in endpoints if name not in asynchronous]
    if asynchronous and synchronous:
        raise ValueError(
            f"{name} mixes both async and sync endpoints: {', '.join(asynchronous)} are async, "
            f"{', '.join(synchronous)} are not. Make all of them `def` or all of them `async def`"
        )
    hooks = {hook: inspect.iscoroutinefunction(method) for hook in _USER_HOOKS if (method := _overrides(cls, hook))}
    if synchronous:
        for hook, is_async in hooks.items():
            if is_async:
                raise ValueError(f"{name} has sync endpoints, but an async {hook}; make it `def`")
        return "sync"
    if asynchronous and hooks.get("__cleanup__") is False:
        raise ValueError(f"{name} has async endpoints, but a synchronous __cleanup__; make it `async def`")
    return "async"
