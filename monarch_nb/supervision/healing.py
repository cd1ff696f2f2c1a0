"""Heals in progress: procs first, then the actor meshes on them, one by one in the order of their spawns."""

from collections import deque
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct, field

from monarch_nb._package import more

from .actions import Action, Healed, HealRefused, Recreate, Respawn, StopOwnedMesh
from .failure import MeshFailure, ending
from .ranks import RankIncarnation, Selection, points_text
from .records import MeshRecord, MeshRecords


class Intensity:
    """At most `limit` restarts of one rank of one mesh in `window` seconds."""

    def __init__(self, limit: int = 3, window: float = 60.0) -> None:
        self.limit = limit
        self.window = window
        self._restarts: dict[str, dict[int, deque[float]]] = {}

    def wait(self, mesh_uid: str, rank: int, now: float) -> float | None:
        """Returns the seconds until the rank may be healed; None means at once."""
        times = self._restarts.get(mesh_uid, {}).get(rank)
        recent = [time for time in times or () if time > now - self.window]
        if len(recent) < self.limit:
            return None
        return recent[-self.limit] + self.window - now if self.limit > 0 else self.window

    def count(self, mesh_uid: str, rank: int, now: float) -> None:
        """Counts a restart of the rank, which begins now."""
        times = self._restarts.setdefault(mesh_uid, {}).setdefault(rank, deque(maxlen=max(self.limit, 1)))
        times.append(now)

    def forget(self, mesh_uid: str, ranks: Collection[int] | None = None) -> None:
        """Forgets the restarts of a mesh, or of some of its ranks."""
        if ranks is None:
            self._restarts.pop(mesh_uid, None)
            return
        times = self._restarts.get(mesh_uid, {})
        for rank in ranks:
            times.pop(rank, None)


class HealRequest(Struct, frozen=True):
    """A request to heal a mesh."""

    number: int
    mesh_uid: str
    selection: Selection
    now: float


class Heal(Struct):
    """The current heal of a proc mesh and the actors on it."""

    targets: dict[str, dict[int, int]]  # of each mesh, the incarnations to be started
    stages: deque[str]
    stage: str = ""
    waiting: set[int] = field(default_factory=set)  # ranks of `stage` not yet reported
    requests: list[HealRequest] = field(default_factory=list)
    queued: list[HealRequest] = field(default_factory=list)  # these need more ranks than this heal restores
    failures: list[MeshFailure] = field(default_factory=list)
    follow: set[int] = field(default_factory=set)  # procs that an owner elsewhere has restored meanwhile


class Healing:
    """All heals, by the uid of their procs."""

    def __init__(
        self, records: MeshRecords, intensity: Intensity, report: Callable[[MeshFailure], list[Action]]
    ) -> None:
        self._report = report
        self._records = records
        self.intensity = intensity
        self._heals: dict[str, Heal] = {}

    def request(self, request: HealRequest) -> list[Action]:
        """Begins a heal, or joins the one under way."""
        mesh = self._records.meshes.get(request.mesh_uid)
        if mesh is None or mesh.ended is not None or mesh.owner is None:
            return self._refuse(request, _refusal(mesh, request.mesh_uid))
        needed = self._needed(mesh, request.selection)
        if not needed:
            return [Healed((request.number,))]
        running = self._heals.get(self._root(mesh))
        if running is not None:
            (running.requests if self._all_healing(needed) else running.queued).append(request)
            return []
        root = self._records.meshes[self._root(mesh)]
        if root.uid in needed and root.owner is None:
            return self._refuse(
                request,
                f"{mesh.name} runs on processes that have failed: heal those first, in the process that spawned them",
            )
        for uid, ranks in needed.items():
            for rank in ranks:
                wait = self.intensity.wait(uid, rank, request.now)
                if wait is not None:
                    return self._refuse(request, self._too_often(uid, rank, wait), wait)
        for uid, ranks in needed.items():
            for rank in ranks:
                self.intensity.count(uid, rank, request.now)
        return self._begin(root, needed, [request])

    def follow(self, procs: MeshRecord, ranks: Iterable[int]) -> list[Action]:
        """Restores this process's actors on procs that were healed by their owner elsewhere."""
        running = self._heals.get(procs.uid)
        if running is not None:
            running.follow.update(ranks)
            return []
        alive = {rank for rank in ranks if procs.at(rank).state == "alive"}
        owned = [mesh for mesh in self._records.on(procs.uid) if mesh.owner is not None and mesh.ended is None]
        needed = {mesh.uid: mesh.failed(alive) for mesh in owned}
        return self._begin(procs, {uid: lost for uid, lost in needed.items() if lost}, [])

    def arrived(self, mesh: MeshRecord, incarnations: Iterable[RankIncarnation]) -> list[Action]:
        """Notes that incarnations of a mesh have started."""
        if mesh.ended is not None:
            return [StopOwnedMesh(mesh.uid)]  # stopped while they were being started
        heal = self._heals.get(self._root(mesh))
        if heal is None or heal.stage != mesh.uid:
            return []
        for rank, incarnation in incarnations:
            if rank in heal.waiting and heal.targets[mesh.uid].get(rank) == incarnation:
                heal.waiting.discard(rank)
                mesh.put(rank, "alive", incarnation)
        return self.settle(mesh)

    def lost(self, mesh: MeshRecord, rank: int) -> bool:
        """Notes a failed rank. Returns whether it was being healed for its owner, which the heal's result informs."""
        heal = self._heals.get(self._root(mesh))
        if heal is None or heal.targets.get(mesh.uid, {}).pop(rank, None) is None:
            return False
        if heal.stage == mesh.uid:
            heal.waiting.discard(rank)
        return mesh.owner in {self._owner(request.mesh_uid) for request in heal.requests}

    def report(self, mesh: MeshRecord, failure: MeshFailure) -> None:
        """Adds a failure to the result of the heal."""
        heal = self._heals.get(self._root(mesh))
        if heal is not None:
            heal.failures.append(failure)

    def dropped(self, mesh: MeshRecord, ranks: Iterable[int]) -> list[Action]:
        """Drops ranks that were stopped and need no healing any more."""
        for rank in ranks:
            self.lost(mesh, rank)
        return self.settle(mesh)

    def cancelled(self, mesh: MeshRecord) -> list[Action]:
        """Drops a whole mesh that was stopped."""
        root = self._root(mesh)
        heal = self._heals.get(root)
        if heal is None:
            return []
        if root == mesh.uid:
            del self._heals[root]
            requests, heal.requests = [*heal.requests, *heal.queued], []
        else:
            requests = [request for request in heal.requests if request.mesh_uid == mesh.uid]
            heal.requests = [request for request in heal.requests if request.mesh_uid != mesh.uid]
            heal.targets.pop(mesh.uid, None)
            if heal.stage == mesh.uid:
                heal.waiting.clear()
        refused: list[Action] = []
        for request in requests:
            refused += self._refuse(request, f"{self._name(request.mesh_uid)} was stopped while it was being healed")
        return [*refused, *self.settle(mesh)]

    def settle(self, mesh: MeshRecord) -> list[Action]:
        """Continues the heal of a mesh, if no rank of its stage is awaited any more."""
        root = self._root(mesh)
        heal = self._heals.get(root)
        if heal is None or heal.waiting:
            return []
        while heal.stages:
            uid = heal.stages.popleft()
            targets = heal.targets.get(uid)
            if targets:
                heal.stage, heal.waiting = uid, set(targets)
                incarnations = tuple(targets.items())
                return [
                    Respawn(uid, incarnations) if self._records.meshes[uid].is_procs else Recreate(uid, incarnations)
                ]
        del self._heals[root]
        numbers = tuple(request.number for request in heal.requests)
        back = tuple((uid, tuple(incarnations.items())) for uid, incarnations in heal.targets.items() if incarnations)
        notified = {self._owner(request.mesh_uid) for request in heal.requests}
        failures = [failure for failure in heal.failures if self._owner(failure.mesh_uid) in notified]
        actions: list[Action] = [Healed(numbers, back, tuple(failures))] if numbers or back else []
        for failure in heal.failures:
            if failure not in failures:  # the heal is no longer awaited: the owner is notified as of any failure
                actions += self._report(failure)
        if heal.follow:
            actions += self.follow(self._records.meshes[root], heal.follow)
        for request in heal.queued:
            actions += self.request(request)
        return actions

    def _begin(self, root: MeshRecord, needed: dict[str, list[int]], requests: list[HealRequest]) -> list[Action]:
        targets: dict[str, dict[int, int]] = {}
        for uid, ranks in needed.items():
            mesh = self._records.meshes[uid]
            targets[uid] = {}
            for rank in ranks:
                before = mesh.at(rank)
                targets[uid][rank] = before.incarnation + 1
                mesh.put(rank, "healing", before.incarnation + 1, before.cause, before.failure_id)
                if mesh.is_procs:
                    self._records.comes(mesh, rank)
        self._heals[root.uid] = Heal(targets, deque(needed), requests=requests)
        return self.settle(root)

    def _needed(self, mesh: MeshRecord, selection: Selection) -> dict[str, list[int]]:
        """Returns the ranks that must be restored for these to work: the procs, then the actors on them."""
        procs, *actors = self._records.family(mesh)
        dead = procs.failed(selection if procs is mesh else set(mesh.failed(selection))) if procs.is_procs else []
        needed = {procs.uid: dead}
        for member in actors or [mesh]:
            if member.owner is not None and member.ended is None:
                needed[member.uid] = member.failed(selection if mesh is procs or mesh is member else set(dead))
        return {uid: ranks for uid, ranks in needed.items() if ranks}

    def _all_healing(self, needed: dict[str, list[int]]) -> bool:
        meshes = self._records.meshes
        return all(meshes[uid].at(rank).state == "healing" for uid, ranks in needed.items() for rank in ranks)

    def _refuse(self, request: HealRequest, text: str, wait: float | None = None) -> list[Action]:
        return [HealRefused(request.number, request.mesh_uid, text, wait)]

    def _too_often(self, uid: str, rank: int, wait: float) -> str:
        mesh, limit = self._records.meshes[uid], self.intensity
        location = points_text(mesh.spec.extent, [mesh.index_of(rank)]) or f"rank {mesh.index_of(rank)}"
        cause = mesh.at(rank).cause
        last = "" if cause is None else f" (last: {cause.text or ending(cause)})"
        return (
            f"{mesh.name} at {location} was healed {limit.limit} times within {limit.window:g} s and failed "
            f"again{last}. Find the cause first: it can be healed again in {max(wait, 1):.0f} s (heal_max_restarts, "
            "heal_window). Its other ranks work meanwhile" + more("manual/supervision.md#healing")
        )

    def _root(self, mesh: MeshRecord) -> str:
        return mesh.on if mesh.on is not None else mesh.uid

    def _owner(self, uid: str) -> str | None:
        mesh = self._records.meshes.get(uid)
        return mesh.owner if mesh else None

    def _name(self, uid: str) -> str:
        mesh = self._records.meshes.get(uid)
        return mesh.name if mesh else uid


def _refusal(mesh: MeshRecord | None, uid: str) -> str:
    if mesh is None:
        return f"there is no mesh {uid} here to heal"
    if mesh.ended is not None:
        return f"{mesh.name} cannot be healed: {mesh.ended.text}; spawn a new one"
    return f"{mesh.name} belongs to another process: heal it in the process that spawned it"
