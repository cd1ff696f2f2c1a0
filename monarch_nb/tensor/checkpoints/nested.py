"""Traversal of nested dictionaries, lists and tuples."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def all_of(kind: type[T], value: Any) -> Iterator[T]:
    """Yields all items of a type in a state, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from all_of(kind, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from all_of(kind, each)


def mapped(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """Copies the structure with `function(item)` for each item of a type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(kind, function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(kind, function, each) for each in value)
    return value
