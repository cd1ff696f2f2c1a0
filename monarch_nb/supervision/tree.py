"""Owners, their meshes, and the failures that each owner handles one at a time."""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct, field

from .failure import MeshFailure
from .ranks import RankIncarnation


class RoutedFailure(Struct, frozen=True):
    """A failure on its way to an owner."""

    failure: MeshFailure
    awaited: bool  # a call that depends on the failed ranks is awaited


class Owner(Struct):
    """An actor of this process that owns meshes."""

    actor: str
    name: str
    mesh_uid: str | None = None  # the mesh of which it is a member, if known here
    incarnation: RankIncarnation | None = None
    owned: dict[str, None] = field(default_factory=dict)  # in the order of their spawns
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
        """Returns the record of an owner, created at first use; None if the owner has ended."""
        if actor in self._ended:
            return None
        owner = self._owners.setdefault(actor, Owner(actor, name or actor))
        if name:
            owner.name = name
        if mesh_uid is not None:
            owner.mesh_uid, owner.incarnation = mesh_uid, incarnation
        return owner

    def get(self, actor: str) -> Owner | None:
        """Returns the record of an owner, if it has one."""
        return self._owners.get(actor)

    def members(self, mesh_uid: str, incarnation: RankIncarnation | None = None) -> Iterator[str]:
        """Yields owners that are members of a mesh, or the one with this incarnation in it."""
        owners = [o for o in self._owners.values() if o.mesh_uid == mesh_uid and incarnation in (None, o.incarnation)]
        yield from (owner.actor for owner in owners)

    def end(self, actor: str) -> list[str]:
        """Removes an owner, with failures that are on their way to it. Returns its meshes, the newest first."""
        self._ended.add(actor)
        owner = self._owners.pop(actor, None)
        return list(reversed(owner.owned)) if owner else []

    def push(self, actor: str, entry: RoutedFailure) -> RoutedFailure | None:
        """Queues a failure for an owner; returns the entry if it is to be handled now."""
        owner = self._owners.get(actor)
        if owner is None:
            return None
        owner.queue.append(entry)
        return self.advance(owner)

    def advance(self, owner: Owner) -> RoutedFailure | None:
        """Returns the owner's next failure, unless one is being handled or none waits."""
        if owner.current is not None or not owner.queue:
            return None
        owner.current = owner.queue.popleft()
        return owner.current

    def finish(self, failure_id: int) -> tuple[Owner, RoutedFailure] | None:
        """Ends an owner's handling of a failure; returns both, None if the failure is no longer of interest."""
        for owner in self._owners.values():
            entry = owner.current
            if entry is not None and entry.failure.failure_id == failure_id:
                owner.current = None
                return owner, entry
        return None
