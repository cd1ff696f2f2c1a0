"""Endpoints of meshes: the adverbs with which their members are called."""

import functools
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, Self, TypeVar, cast, overload

from monarch_nb.mesh.handle import Handle, operations
from monarch_nb.mesh.sending import (
    HeldByRanksError,
    LentFrames,
    arguments_that_fit,
    callers_signature,
    check_arguments,
    encode_arguments,
    hidden_from_callers,
    send_region,
)
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.runtime import (
    ActorState,
    AnyEndpoint,
    EndpointProperty,
    Future,
    PendingCall,
    Port,
    PortCall,
    StreamCall,
    Thunk,
    current_runtime,
    endpoints_of,
    returns_future,
    undeclared_name,
)
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import OutFrame, encode

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")
_NO_ARGUMENTS = encode(((), {}))[0]
F = TypeVar("F", bound=Callable[..., object])
_RETURN_TYPES = {
    "call": "Future[ValueMesh[{}]]",
    "call_one": "Future[{}]",
    "choose": "Future[{}]",
    "stream": "Iterator[Future[{}]]",
}


class PerObject:
    """An attribute that is computed for each object; the class has another attribute of that name, or none."""

    def __init__(self, compute: Callable[[Any], object], of_class: object = None) -> None:
        self._compute = compute
        self._of_class = of_class

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is not None:
            return self._compute(instance)
        if self._of_class is None:
            raise AttributeError("only objects of this class have it")
        return self._of_class


class Adverb(functools.partial[object]):
    """One adverb of one endpoint. A call of it sends; its display shows the endpoint's method."""

    __signature__ = PerObject(lambda adverb: _signature(adverb))

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return self.func.__name__
        if name == "__qualname__":
            return f"{self.args[0]._title}.{self.func.__name__}"
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{self.args[0]._title}.{self.func.__name__}>"


class _AdverbOfEndpoint:
    """An adverb of a class of endpoints; each endpoint makes its own at the first use, and keeps it."""

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self._method
        bound = instance.__dict__[self._name] = Adverb(self._method, instance)
        return bound


def _adverb(method: F) -> F:
    """Marks a method of Endpoint as an adverb."""
    return _AdverbOfEndpoint(method)  # type: ignore[return-value]  # called in the same way


def _declared_signature(endpoint: "Endpoint[..., object]") -> inspect.Signature:
    """Returns the signature of the endpoint's method as callers see it."""
    declared = endpoint._current()
    return callers_signature(declared.method, hidden_from_callers(declared))


def _declared_doc(endpoint: "Endpoint[..., object]") -> str | None:
    """Returns the docstring of the endpoint's method."""
    return inspect.getdoc(endpoint._current().method)


def _signature(bound: Adverb) -> inspect.Signature:
    endpoint = bound.args[0]
    signature = _declared_signature(endpoint)
    annotation: object = signature.return_annotation
    form = _RETURN_TYPES.get(bound.func.__name__)
    if endpoint._current().explicit_response_port or annotation is signature.empty or form is None:
        return signature.replace(return_annotation=signature.empty)
    return signature.replace(return_annotation=_Annotation(form.format(_annotation(annotation))))


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _doc(bound: Adverb) -> str:
    own = inspect.getdoc(bound.func) or ""
    return "\n\n".join(filter(None, (_declared_doc(bound.args[0]), f"{bound.func.__name__}: {own}")))


class _Annotation:
    """An annotation for display only."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


Adverb.__doc__ = PerObject(_doc, Adverb.__doc__)  # type: ignore[assignment]


class Endpoint(Generic[P, R]):
    """One endpoint of a mesh (or slice). Messages are sent when an adverb is called; futures only collect."""

    __signature__ = PerObject(_declared_signature)  # with `__wrapped__` and `__doc__`: the content of `mesh.step?`
    __wrapped__ = PerObject(lambda endpoint: endpoint._current().method)

    def __init__(self, mesh: Handle[ActorState], name: str, declared: EndpointProperty[P, R]) -> None:
        self._mesh = mesh
        self._name = name
        self._declared = declared
        self._title = f"{mesh._state.name}.{name.lstrip('@!')}"
        self._cls = mesh._state.cls
        self._fits = range(0)  # numbers of positional arguments that surely fit; empty while unknown
        self._timeout: float | None = None

    def options(self, *, timeout: float | None = None) -> Self:
        """Returns the same endpoint with a limit for its calls: `mesh.step.options(timeout=5).call(x)`.

        A call not answered by all its ranks within `timeout` seconds of being sent ends with a TimeoutError that names
        those missing, and is cancelled there, as by `Future.cancel`. None is no limit. Raises ValueError for a timeout
        that is no positive number of seconds.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0
        ):
            raise ValueError(f"timeout must be None or a number of seconds > 0, not {timeout!r}")
        limited = type(self)(self._mesh, self._name, self._current())
        limited._timeout = None if timeout is None or math.isinf(timeout) else float(timeout)
        return limited

    def _current(self) -> EndpointProperty[P, R]:
        """Returns the declaration in the mesh's current class: a reload may have changed it."""
        if self._cls is not self._mesh._state.cls:
            self._cls = self._mesh._state.cls
            self._declared = cast("EndpointProperty[P, R]", endpoints_of(self._cls).get(self._name, self._declared))
            self._fits = range(0)
        return self._declared

    def _frames(self, args: tuple[object, ...], kwargs: dict[str, object], region: Region) -> list[OutFrame]:
        declared = self._current()
        hidden = hidden_from_callers(declared)
        if kwargs or len(args) not in self._fits:
            check_arguments(declared.method, hidden, self._title, args, kwargs)
            self._fits = arguments_that_fit(declared)
        elif not args:
            return [_NO_ARGUMENTS]
        try:
            return encode_arguments(self._title, args, kwargs, declared.method, hidden)
        except HeldByRanksError:
            return operations().lent_frames(self._mesh._new_with_region(region), self._title, args, kwargs)

    def _begin(self, call: PendingCall[object], region: Region, frames: Sequence[OutFrame]) -> None:
        runtime = current_runtime()
        context = runtime.context()
        state = self._mesh._state
        for listener in runtime.on_call:
            listener(state)
        failure = runtime.supervisor.check(state, region, call)
        if failure is not None:
            call.fail(failure)
            return
        unread = state.procs.unread
        if unread is not None and not state.inner and state.uid in state.procs.actors:  # a call that `results` can list
            unread.add(call)
        try:
            if isinstance(frames, LentFrames):
                with frames.sending(call.call, call):
                    send_region(runtime, context, state, region, self._name, frames, pending=call)
            else:
                send_region(runtime, context, state, region, self._name, frames, pending=call)
        except BaseException:
            call.close()
            raise
        if self._timeout is not None:
            runtime.limit_call(call, self._timeout)

    def _pending(self, region: Region, build: Callable[[list[Thunk]], T]) -> PendingCall[T]:
        call = PendingCall(current_runtime(), self._title, self._mesh._state.uid, region.ranks, len(region), build)
        call.kind = self._mesh._state.kind
        call.may_be_cancelled()
        return call

    @_adverb
    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Calls every member; the future gives a ValueMesh, or raises the first error.

        After the first error, the other members are waited for `call_error_window` (3 s) and no longer.
        """
        region = self._mesh._region
        frames = self._frames(args, kwargs, region)
        base = self._mesh._state.region
        call = self._pending(region, lambda replies: ValueMesh._of_thunks(region, replies, base))
        self._begin(call, region, frames)
        return call.hand_out()

    @_adverb
    def call_one(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls the only member. Raises ValueError at once when there are more."""
        region = self._mesh._region
        if len(region) != 1:
            raise ValueError(
                f"call_one requires exactly 1 actor, but mesh has {len(region)}: "
                f"slice {self._mesh._state.name} to one, or use .call() or .choose()"
            )
        return self._call_member(region, args, kwargs)

    @_adverb
    def choose(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls one member, picked uniformly at random."""
        region = self._mesh._region
        rank = region.ndslice.get(random.randrange(len(region)))
        return self._call_member(Region((), NDSlice(rank, (), ())), args, kwargs)

    def _call_member(self, region: Region, args: tuple[object, ...], kwargs: dict[str, object]) -> Future[R]:
        frames = self._frames(args, kwargs, region)
        call = self._pending(region, lambda replies: replies[0]())
        self._begin(call, region, frames)
        return call.hand_out()

    @_adverb
    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Calls every member; returns one future each, which resolve in the order of arrival of the answers."""
        region = self._mesh._region
        frames = self._frames(args, kwargs, region)
        call: StreamCall[R] = StreamCall(
            current_runtime(), self._title, self._mesh._state.uid, region.ranks, len(region)
        )
        call.kind = self._mesh._state.kind
        self._begin(call, region, frames)
        return call.futures()

    @_adverb
    def broadcast(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every member without waiting for answers: an exception in the endpoint fails the actor."""
        if self._timeout is not None:
            raise ValueError(
                f"{self._title}.broadcast does not wait for answers, so a timeout has no meaning: use .call()"
            )
        send(self, args, kwargs)

    @_adverb
    def rref(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Calls every member; each result is the value of its rank in tensors that are returned at once.

        `propagate` of the endpoint describes these tensors: a function, "inspect" where it returns nothing, or "cached"
        to wait for the members. Raises NotImplementedError without. An error in it counts as that of an operation.
        """
        declared, region = self._current(), self._mesh._region
        check_arguments(declared.method, hidden_from_callers(declared), self._title, args, kwargs)

        def post(frames: Sequence[OutFrame]) -> str:
            return _post(self, region, frames, None)

        return operations().tensors_of(self._mesh, self._title, declared.propagator, args, kwargs, post)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """An endpoint is called with an adverb: .call(...) for all members, .call_one(...) for one, and more.

        Raises TypeError, always.
        """
        raise TypeError(
            f"{self._title} is an endpoint: say how to call it, e.g. {self._title}.call(...).get() for all members, "
            f".call_one(...) for one, .broadcast(...) without waiting"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._title} of {self._mesh!r}>"


Endpoint.__doc__ = PerObject(_declared_doc, Endpoint.__doc__)  # type: ignore[assignment]


class SendsToPorts(ABC):
    """A callable that is used like an endpoint, such as a function on the ranks of a mesh."""

    @abstractmethod
    def send_to(
        self, port: Port[Any] | None, args: tuple[object, ...], kwargs: dict[str, object], *, single: bool
    ) -> None:
        """Calls it on all ranks, or on a single one; answers go to the port."""


def send(
    endpoint: Endpoint[..., object] | SendsToPorts,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    port: Port[Any] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """The lowest level: sends a call whose answers, if any are wanted, go to `port`, tagged with their rank."""
    if selection not in ("all", "choose"):
        raise ValueError(f"send: selection={selection!r} is neither 'all' nor 'choose'")
    if isinstance(endpoint, SendsToPorts):
        endpoint.send_to(port, args, kwargs, single=selection == "choose")
        return
    mesh = endpoint._mesh
    region = mesh._region
    if selection == "choose":
        region = Region((), NDSlice(region.ndslice.get(random.randrange(len(region))), (), ()))
    frames = endpoint._frames(args, kwargs, region)
    _post(endpoint, region, frames, port)


def _post(endpoint: Endpoint[..., object], region: Region, frames: Sequence[OutFrame], port: Port[Any] | None) -> str:
    """Sends a call whose answers, if any are wanted, go to `port`; returns its id."""
    runtime, state = current_runtime(), endpoint._mesh._state
    context = runtime.context()
    for listener in runtime.on_call:
        listener(state)
    failure = runtime.supervisor.check(state, region, None)
    if failure is not None:
        raise failure
    pending = None if port is None else PortCall(runtime, endpoint._title, state.uid, region.ranks, len(region), port)
    call = runtime.new_call() if pending is None else pending.call
    try:
        with frames.sending(call, pending) if isinstance(frames, LentFrames) else nullcontext():
            send_region(runtime, context, state, region, endpoint._name, frames, pending=pending, call=call)
    except BaseException:
        if pending is not None:
            pending.close()
        raise
    return call


class NotAnEndpoint:
    """A method that is not marked with `@endpoint`. Only `as_endpoint` can use it."""

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
        """Raises RuntimeError that says what to do instead."""
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
    """Makes an endpoint of a spawned actor's method without `@endpoint`: `as_endpoint(mesh.method).call(...)`.

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


A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on a whole mesh and folds the answers, in order of arrival: `combine(so_far, answer)`."""

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Sends the call now; the answers are folded when the future is observed, by its observer."""
        answers = self._endpoint.stream(*args, **kwargs)

        @returns_future
        async def fold(answers: Iterator[Future[R]]) -> A:
            value = self._identity
            for answer in answers:
                value = self._combine(value, await answer)
            return value

        return fold(answers)
