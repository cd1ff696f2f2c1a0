"""The base class of users' actors."""

import logging
from collections.abc import Awaitable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self


def _default(method: "Callable[..., object]") -> "Callable[..., object]":
    method._monarch_default = True  # type: ignore[attr-defined]
    return method


def _no_mesh(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name}() belongs to the mesh that ProcMesh.spawn returned, not to the actor itself")


class Actor:
    """An object with private state whose `@endpoint` methods are called with messages, one at a time.

    `__init__` runs in the actor's own process and thread, before its first message.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named after the class."""
        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    @_default
    def __supervise__(self, failure: Any) -> bool:
        """Called with a `MeshFailure` when a mesh this actor owns fails. Return True when it is handled."""
        return False

    @_default
    def __cleanup__(self, exc: Exception | None) -> Awaitable[None] | None:
        """Called when the actor stops, after the meshes it owns; `exc` is None for an ordinary stop."""
        return None

    @_default
    def __healed__(self, points: Any) -> None:
        """Called on ranks that survived, between messages, with the points that were re-created by `heal_mesh`."""

    @_default
    def _handle_undeliverable_message(self, message: Any) -> bool | Awaitable[bool]:
        """Called when a message this actor sent could not be delivered. Return True when that is no fault."""
        return False

    # `spawn` is typed as the class, so editors and type checkers offer the members of meshes on actors.

    def slice(self, /, **dims: "Any") -> "Self":
        """On a mesh of such actors: returns some of them. On an actor itself: NotImplementedError."""
        raise _no_mesh("slice")

    def split(self, /, **splits: "int | Sequence[str]") -> "Self":
        """On a mesh of such actors: splits a dimension into several. On an actor itself: NotImplementedError."""
        raise _no_mesh("split")

    def flatten(self, name: str) -> "Self":
        """On a mesh of such actors: joins all dimensions into one. On an actor itself: NotImplementedError."""
        raise _no_mesh("flatten")

    def rename(self, /, **names: str) -> "Self":
        """On a mesh of such actors: changes labels. On an actor itself: NotImplementedError."""
        raise _no_mesh("rename")

    def size(self, dim: "str | Sequence[str] | None" = None) -> int:
        """On a mesh of such actors: returns their number. On an actor itself: NotImplementedError."""
        raise _no_mesh("size")
