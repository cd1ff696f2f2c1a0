"""Spans that a program asks for by name."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar, overload

from monarch_nb.runtime.spans import Span, in_span

P = ParamSpec("P")
R = TypeVar("R")


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
