"""Spans, counters and histograms of OpenTelemetry. Without that package nothing is recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from monarch_nb.runtime.recorder import Span, in_span

P = ParamSpec("P")
R = TypeVar("R")


class Instrument(Protocol):
    """An instrument of a meter. Its kind determines its methods."""

    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Adds to the count; for counters."""

    def record(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Records one value; for histograms."""

    def set(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Records the current value; for gauges."""


class Meter(Protocol):
    """Creates instruments; the names are OpenTelemetry's."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        """Creates a counter that only increases."""

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        """Creates a counter that increases and decreases."""

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Any:
        """Creates an instrument for a distribution of many values."""

    def create_observable_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """Creates a counter that is read through callbacks."""

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """Creates an up-down counter that is read through callbacks."""

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> Any:
        """Creates a gauge that is read through callbacks."""


class _Nothing:
    """An instrument that discards everything."""

    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Does nothing."""

    record = set = add


class _NoMeter:
    """A stand-in for a meter."""

    def _make(self, name: str, *_: object, **__: object) -> _Nothing:
        return _Nothing()

    create_counter = create_up_down_counter = create_histogram = create_gauge = _make
    create_observable_counter = create_observable_up_down_counter = create_observable_gauge = _make


def get_meter(name: str = "monarch") -> Meter:
    """Returns a meter of OpenTelemetry; its measurements go to the provider that the program has set, or will set.

    Without the package opentelemetry-api, its instruments discard everything.
    """
    try:
        from opentelemetry import metrics
    except ImportError:
        return _NoMeter()
    meter: Meter = metrics.get_meter(name)
    return meter


def span(name: str, attributes: Mapping[str, object] | None = None) -> Span:
    """Returns a span for a `with` block, of the current actor if any, which is recorded if tracing is set up."""
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
