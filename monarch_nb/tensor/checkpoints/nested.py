"""Traversal of nested dictionaries, lists and tuples."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def all_of(kind: type[T], value: Any) -> Iterator[T]:
    """Yields all items of a type in a state, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from all_of(kind, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_of(kind, item)


def mapped(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """Copies the structure with `function(item)` for each item of a type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(kind, function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(kind, function, item) for item in value)
    return value
