"""What a part of the rows above is asked for by, where its type cannot be imported."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Feature(Generic[T]):
    """The name of a part that a process loads when it is first needed, and its type."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
