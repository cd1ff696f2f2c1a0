"""Who still refers to a tensor on the workers."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.tensor.origin import Place
from monarch_nb.tensor.propagation import Meta

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream


class Reference:
    """Stands for a tensor on the workers, in all handles of it: with the last of them, the tensor goes.

    `stream` is that of its mesh, `number` its name there.
    """

    __slots__ = ("__weakref__", "number", "stream")

    def __init__(self, stream: "Stream", number: int) -> None:
        self.stream, self.number = stream, number


class LiveEntry(weakref.ref[Reference]):
    """What the controller knows of a tensor. It tells of the end of its reference by `ended`, which gets the entry.

    That is a weak reference and no finalizer, since Ctrl-C may come in a finalizer, which then is cut off.
    """

    __slots__ = ("meta", "number", "place")

    number: int
    meta: Meta
    place: Place | None

    def __new__(  # noqa: D102
        cls, reference: Reference, ended: Callable[["LiveEntry"], None], meta: Meta, place: Place | None
    ) -> "LiveEntry":
        entry = super().__new__(cls, reference, ended)
        entry.number, entry.meta, entry.place = reference.number, meta, place
        return entry

    def __init__(self, *arguments: Any) -> None:
        pass
