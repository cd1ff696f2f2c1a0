"""The records of a process while a timeline is recorded, and spans of OpenTelemetry around code that runs here.

Records are appended when they are known on the thread where it happens; `take` removes and returns them. Nothing is
recorded, and one attribute is read, while `Runtime.recorder` is None. The library never imports OpenTelemetry by itself
for spans: a process that has not imported it records none.
"""

import functools
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar, cast

from monarch_nb.runtime.context import current
from monarch_nb.settings import settings
from monarch_nb.wire import users_frame

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.calls import PendingCall
    from monarch_nb.wire import Header

MOST = 20_000  # of each kind between two calls of `take`
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_TRACE = "opentelemetry.trace"


class RunCall(NamedTuple):
    """A call that ran here. Times are of the monotonic clock."""

    mesh: str
    rank: int
    endpoint: str
    call: str
    began: float
    ended: float
    failed: bool


class CallBegun(NamedTuple):
    """A call that was sent from here, with the innermost line of the user's program that led to it."""

    call: str
    title: str
    mesh: str
    size: int
    began: float
    file: str
    line: int


class CallEnded(NamedTuple):
    """The time at which all answers of a call have arrived, or will not arrive any more."""

    call: str
    ended: float


class TimeSpan(NamedTuple):
    """A named stretch of time: a span of the program, a transfer of memory, a pause of the interpreter."""

    kind: str
    name: str
    mesh: str
    rank: int
    began: float
    ended: float


class CallRecorder:
    """The records of one process since they were last taken; records beyond `MOST` replace the oldest."""

    def __init__(self) -> None:
        self._runs: deque[RunCall] = deque(maxlen=MOST)
        self._sent: deque[CallBegun] = deque(maxlen=MOST)
        self._answered: deque[CallEnded] = deque(maxlen=MOST)
        self._stretches: deque[TimeSpan] = deque(maxlen=MOST)
        self._raised: set[tuple[int, str]] = set()

    def raised(self, cell: "ActorCell", call: str) -> None:
        """Notes that a running call has raised."""
        self._raised.add((id(cell), call))

    def ran(self, cell: "ActorCell", header: "Header", began: float) -> None:
        """Records a call that has ended."""
        key, failed = (id(cell), header.call), False
        if self._raised and key in self._raised:
            self._raised.discard(key)
            failed = True
        now = time.monotonic()
        self._runs.append(RunCall(cell.mesh, cell.rank, header.method, header.call, began, now, failed))

    def sent(self, call: "PendingCall[object]") -> None:
        """Records a call that is about to be sent, on the thread that makes it."""
        frame = users_frame(sys._getframe(2))
        location = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self._sent.append(CallBegun(call.call, call.title, call.mesh, call.size, time.monotonic(), *location))

    def answered(self, call: str) -> None:
        """Records that a call waits for no more answers."""
        self._answered.append(CallEnded(call, time.monotonic()))

    def stretch(self, kind: str, name: str, began: float) -> None:
        """Records a span of the current actor that has ended; outside of actors, of the process."""
        context = current.get()
        mesh, rank = ("", 0) if context is None else (context.actor_instance.mesh, context.actor_instance.base_rank)
        self._stretches.append(TimeSpan(kind, name, mesh, rank, began, time.monotonic()))

    def take(self) -> tuple[list[RunCall], list[CallBegun], list[CallEnded], list[TimeSpan]]:
        """Returns the records since the last call."""
        return _emptied(self._runs), _emptied(self._sent), _emptied(self._answered), _emptied(self._stretches)


def _emptied(records: "deque[T]") -> list[T]:
    """Removes and returns all items of a deque to which other threads append."""
    return [records.popleft() for _ in range(len(records))]


class CollectionWatch:
    """Records collections of garbage that pause the interpreter for a while, as the hook of the garbage collector."""

    LEAST_S = 0.002

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        self._began = threading.local()

    def __call__(self, phase: str, facts: object) -> None:
        """Called by the collector on the thread that it runs on."""
        now = time.monotonic()
        if phase == "start":
            self._began.at = now
        elif now - getattr(self._began, "at", now) >= self.LEAST_S:
            self._recorder.stretch("pause", "garbage collection", self._began.at)


def tracer() -> Any:
    """Returns the tracer that records spans; None if the program has set up no recording."""
    trace = sys.modules.get(_TRACE)
    if trace is None:
        return None
    try:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
    except AttributeError:  # another thread is importing it right now
        return None
    return provider.get_tracer("monarch_nb") if settings.enable_otel_tracing else None


class Span:
    """A named stretch of time, from `with` to the end of its block. An exception that leaves the block is recorded.

    It is also part of a timeline that is being recorded, unless it is the span of an endpoint: `own` is False.
    """

    __slots__ = ("_attributes", "_began", "_entered", "_name", "_own", "_span")

    def __init__(self, name: str, attributes: Mapping[str, object] | None = None, *, own: bool = True) -> None:
        self._name = name
        self._own = own
        self._began = 0.0
        self._attributes = attributes
        self._entered: Any = None
        self._span: Any = None

    def __enter__(self) -> Self:
        running = current.get()
        if self._own and running is not None and running.actor_instance.process.recorder is not None:
            self._began = time.monotonic()
        otel = tracer()
        if otel is not None:
            actor = {} if running is None else {"monarch.actor": str(running.actor_instance)}
            self._entered = otel.start_as_current_span(self._name, attributes={**actor, **(self._attributes or {})})
            self._span = self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        began, self._began = self._began, 0.0
        if began and (running := current.get()) is not None:
            recorder = running.actor_instance.process.recorder
            if recorder is not None:
                recorder.stretch("span", self._name, began)
        entered, self._entered, self._span = self._entered, None, None
        if entered is not None:
            entered.__exit__(kind, error, trace)

    def set_attribute(self, key: str, value: object) -> None:
        """Adds an attribute; does nothing without a recording."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def add_event(self, name: str, attributes: Mapping[str, object] | None = None) -> None:
        """Adds an event at the current time; does nothing without a recording."""
        if self._span is not None:
            self._span.add_event(name, attributes)


def within(function: Callable[P, R], context: Callable[[], AbstractContextManager[object]]) -> Callable[P, R]:
    """Returns the function with each call in a new context."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> object:
            with context():
                return await function(*args, **kwargs)

        return cast("Callable[P, R]", run_async)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return function(*args, **kwargs)

    return run


def in_span(function: Callable[P, R], name: str, *, own: bool = True) -> Callable[P, R]:
    """Returns the function with each call in a span."""
    return within(function, lambda: Span(name, own=own))


def traceparent() -> str:
    """Returns the W3C text of the current span, for the header of a message; "" without one."""
    trace = sys.modules.get(_TRACE)
    if trace is not None:
        try:
            span = trace.get_current_span().get_span_context()
            if span.is_valid:
                return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
        except AttributeError:  # another thread is importing it right now
            pass
    running = current.get()
    return "" if running is None else running.trace  # passed on by a process that records nothing itself


def continued(text: str) -> Callable[[], None]:
    """Makes spans of this thread or task children of the sender's span, until the returned function is called."""
    trace = sys.modules.get(_TRACE)
    parts = text.split("-")
    if trace is None or len(parts) != 4:
        return _nothing
    try:
        from opentelemetry import context

        flags = trace.TraceFlags(int(parts[3], 16))
        parent = trace.SpanContext(int(parts[1], 16), int(parts[2], 16), is_remote=True, trace_flags=flags)
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
    except (AttributeError, ImportError, ValueError):
        return _nothing
    return lambda: context.detach(token)


def _nothing() -> None:
    return None


def instrumented(method: Callable[..., object], name: str) -> Callable[..., object]:
    """Returns an endpoint's method, in a span if spans are recorded."""
    if _TRACE not in sys.modules or tracer() is None:
        return method
    return in_span(method, name, own=False)
