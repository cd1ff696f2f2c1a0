"""Spans, counters and histograms of OpenTelemetry. Without that package nothing is recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from monarch_nb.runtime.spans import Span, in_span

P = ParamSpec("P")
R = TypeVar("R")


class Instrument(Protocol):
    """An instrument of a meter. Its kind decides which of the methods it has."""

    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Counts on; of counters."""

    def record(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Notes one value; of histograms."""

    def set(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Notes the current value; of gauges."""


class Meter(Protocol):
    """Makes instruments; the names are OpenTelemetry's."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        """Only goes up."""

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        """Goes up and down."""

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Any:
        """Many values, of which the distribution matters."""

    def create_observable_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """A counter that is read through callbacks."""

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """An up-down counter that is read through callbacks."""

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """A gauge that is read through callbacks."""


class _Nothing:
    """Instrument that discards everything."""

    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Does nothing."""

    record = set = add


class _NoMeter:
    """Stands in for a meter."""

    def _make(self, name: str, *_: object, **__: object) -> _Nothing:
        return _Nothing()

    create_counter = create_up_down_counter = create_histogram = create_gauge = _make
    create_observable_counter = create_observable_up_down_counter = create_observable_gauge = _make


def get_meter(name: str = "monarch") -> Meter:
    """A meter of OpenTelemetry; what it measures goes to the provider that the program has set, or will set.

    Where the package opentelemetry-api is not installed, its instruments accept everything and keep nothing.
    """
    try:
        from opentelemetry import metrics
    except ImportError:
        return _NoMeter()
    meter: Meter = metrics.get_meter(name)
    return meter


def span(name: str, attributes: Mapping[str, object] | None = None) -> Span:
    """A span for a `with` block, of the current actor if any. It is recorded where the program has set up tracing."""
    return Span(name, attributes)


@overload
def traced(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def traced(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def traced(fn: Callable[..., object] | None = None, *, name: str | None = None) -> object:
    """Runs each call of a function, `def` or `async def`, in a span with its name or another."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return in_span(function, name or str(getattr(function, "__name__", function)))

    return decorate if fn is None else decorate(fn)
