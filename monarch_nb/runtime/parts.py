"""Parts of the rows above that a process keeps: one object of each kind, found by its type."""

from typing import TypeVar, cast

T = TypeVar("T")


class Parts:
    """Filled by the composition root."""

    def __init__(self) -> None:
        self._by_kind: dict[type, object] = {}

    def add(self, kind: type[T], part: T) -> T:
        """The process has that part from now on. Raises ValueError for a second one of its kind."""
        if kind in self._by_kind:
            raise ValueError(f"this process has a {kind.__name__} already")
        self._by_kind[kind] = part
        return part

    def get(self, kind: type[T]) -> T:
        """The part of a kind. Raises LookupError where there is none."""
        try:
            return cast(T, self._by_kind[kind])
        except KeyError:
            raise LookupError(f"this process has no {kind.__name__}") from None
