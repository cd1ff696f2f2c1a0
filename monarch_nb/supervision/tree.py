"""Owners, their meshes, and the failures that each is handed one at a time."""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct, field

from .failure import MeshFailure
from .ranks import RankIncarnation


class RoutedFailure(Struct, frozen=True):
    """A failure on its way to an owner."""

    failure: MeshFailure
    awaited: bool  # somebody waits for a call that depends on what failed


class Owner(Struct):
    """An actor of this process that owns meshes."""

    actor: str
    name: str
    mesh_uid: str | None = None  # the mesh it is a member of itself, if that is known here
    incarnation: RankIncarnation | None = None
    owned: dict[str, None] = field(default_factory=dict)  # in the order they were spawned
    queue: deque[RoutedFailure] = field(default_factory=deque)
    current: RoutedFailure | None = None


class Tree:
    """The owners of this process."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._ended: set[str] = set()

    def join(
        self, actor: str, name: str = "", mesh_uid: str | None = None, incarnation: RankIncarnation | None = None
    ) -> Owner | None:
        """The record of an owner, made at first use; None if the owner is gone already."""
        if actor in self._ended:
            return None
        owner = self._owners.setdefault(actor, Owner(actor, name or actor))
        if name:
            owner.name = name
        if mesh_uid is not None:
            owner.mesh_uid, owner.incarnation = mesh_uid, incarnation
        return owner

    def get(self, actor: str) -> Owner | None:
        """The record of an owner, if it has one."""
        return self._owners.get(actor)

    def members(self, mesh_uid: str, incarnation: RankIncarnation | None = None) -> Iterator[str]:
        """Owners that are members of a mesh, or the one with this incarnation in it."""
        owners = [o for o in self._owners.values() if o.mesh_uid == mesh_uid and incarnation in (None, o.incarnation)]
        yield from (owner.actor for owner in owners)

    def end(self, actor: str) -> list[str]:
        """Removes an owner, with failures that are on their way to it. Returns its meshes, the newest first."""
        self._ended.add(actor)
        owner = self._owners.pop(actor, None)
        return list(reversed(owner.owned)) if owner else []

    def push(self, actor: str, entry: RoutedFailure) -> RoutedFailure | None:
        """Queue a failure for an owner; the entry comes back if it is to be handed over now."""
        owner = self._owners.get(actor)
        if owner is None:
            return None
        owner.queue.append(entry)
        return self.advance(owner)

    def advance(self, owner: Owner) -> RoutedFailure | None:
        """The next failure to hand over, unless one is being handled or none waits."""
        if owner.current is not None or not owner.queue:
            return None
        owner.current = owner.queue.popleft()
        return owner.current

    def finish(self, failure_id: int) -> tuple[Owner, RoutedFailure] | None:
        """The owner that was handling a failure, which it is done with; None if that is no longer of interest."""
        for owner in self._owners.values():
            entry = owner.current
            if entry is not None and entry.failure.failure_id == failure_id:
                owner.current = None
                return owner, entry
        return None
