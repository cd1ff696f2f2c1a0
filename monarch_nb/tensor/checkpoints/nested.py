"""States as programs keep them: dictionaries, lists and tuples of each other."""

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def all_of(kind: type[T], value: Any) -> Iterator[T]:
    """All of a type that stand in a state, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from all_of(kind, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from all_of(kind, each)
