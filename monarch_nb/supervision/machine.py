"""The supervision of one process: events in, actions out. No I/O, no clock, no threads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Literal

import msgspec

from monarch_nb.runtime import Cause, stop_cause

from .actions import Action, FailActor, FailCalls, RootFault, ShowFailure, StopOwnedMesh, Supervise
from .failure import PROCS_STOPPED, MeshFailure
from .healing import Healing, HealRequest, Intensity
from .ranks import RankIncarnation, Selection
from .records import MeshRecord, MeshRecords, MeshSpec, RankStatus, RoutedFailure, Tree

_NOT_STARTED = Cause(kind="spawn", text="it has not been started yet")
RootPolicy = Literal["notebook", "script"]


class SupervisionMachine:
    """Records the meshes that this process's actors own or refer to; decides which owner is notified of a failure.

    A dead process affects its own rank and every actor on it, but an owner is notified once: for the actor mesh with an
    awaited call (`awaited`), else for one with an unanswered call (`called`), else for the first actor mesh spawned
    there, else for the procs.
    """

    def __init__(
        self,
        *,
        root: str | None = None,
        root_policy: RootPolicy = "script",
        root_supervises: bool = False,
        max_restarts: int = 3,
        window: float = 60.0,
    ) -> None:
        self._records = MeshRecords()
        self._tree = Tree()
        self.root = root
        self.root_policy: RootPolicy = root_policy
        self.root_supervises = root_supervises  # the root has its own handler, called before a failure is shown
        self.intensity = Intensity(max_restarts, window)
        self._healing = Healing(self._records, self.intensity, self._report)
        self._ids = count(1)
        self._awaited: dict[int, MeshFailure] = {}
        self.raised_in_use: set[str] = set()  # procs whose failures are raised on use: never fatal here
        if root is not None:
            self._tree.join(root, "<root>")

    # Queries, which change nothing

    def status(self, mesh_uid: str) -> Mapping[int, RankStatus]:
        """Returns the status of each rank of a mesh. Raises KeyError if the mesh is not known here."""
        return self._records.status(mesh_uid)

    def ranks_not_alive(self, mesh_uid: str | None = None) -> list[tuple[str, Cause | None, dict[int, RankStatus]]]:
        """Returns all known meshes, or one, with the cause of each one's end, if any, and its ranks with a record."""
        meshes = self._records.meshes
        chosen = meshes if mesh_uid is None else [mesh_uid] if mesh_uid in meshes else ()
        return [(uid, meshes[uid].ended, dict(meshes[uid].odd)) for uid in chosen]

    def owner_name(self, actor: str) -> str:
        """Returns the name of an owner."""
        record = self._tree.get(actor)
        return record.name if record is not None else actor

    def incarnations(self, mesh_uid: str) -> dict[int, int]:
        """Returns the incarnation of each rank that was ever healed; all others are in their first, 0."""
        odd = self._records.meshes[mesh_uid].odd
        return {rank: status.incarnation for rank, status in odd.items() if status.incarnation}

    def since(self, mesh_uid: str) -> dict[int, int]:
        """Returns the number of a host's last loss, for each rank that was healed after it."""
        mesh = self._records.meshes[mesh_uid]
        procs = mesh if mesh.on is None else self._records.meshes[mesh.on]
        return {rank: self._records.since(mesh, rank) for rank in {*mesh.since, *procs.since} if rank in mesh}

    def sound(self, mesh_uid: str) -> bool:
        """Returns whether a mesh has not ended, and none of its ranks has ever failed or been healed; needs no lock."""
        mesh = self._records.meshes.get(mesh_uid)
        return mesh is None or (mesh.ended is None and not mesh.odd)

    def check(self, mesh_uid: str, selection: Selection = None) -> MeshFailure | None:
        """Returns the failure that a call on these ranks raises; None if all work, or the mesh is not known here."""
        mesh = self._records.meshes.get(mesh_uid)
        return None if mesh is None else self._records.broken(mesh, selection)

    def describe(self, mesh_uid: str, ranks: Sequence[int], cause: Cause) -> MeshFailure | None:
        """Returns, for display, an event at ranks of a mesh that is no failure of them."""
        mesh = self._records.meshes.get(mesh_uid)
        return None if mesh is None else mesh.failure([rank for rank in ranks if rank in mesh], cause)

    # Meshes and owners

    def join(
        self, actor: str, name: str, mesh_uid: str | None = None, incarnation: RankIncarnation | None = None
    ) -> None:
        """Registers an owner before it owns, with its name, its mesh and its incarnation there."""
        self._tree.join(actor, name, mesh_uid, incarnation)

    def own(self, owner: str, spec: MeshSpec, incarnations: Mapping[int, int] | None = None) -> list[Action]:
        """Registers a mesh that an actor of this process has spawned, or owns again, perhaps with healed ranks."""
        record = self._tree.join(owner)
        mesh = MeshRecord(spec, owner)
        mesh.begin(incarnations or {})
        self._records.add(mesh)
        if record is None:
            mesh.ended = stop_cause("its owner is gone")
            return [StopOwnedMesh(mesh.uid)]
        record.owned[mesh.uid] = None
        if mesh.on is None:
            return []
        procs = self._records.meshes[mesh.on]
        if procs.ended is not None:
            mesh.ended = stop_cause(PROCS_STOPPED)
            return []
        actions: list[Action] = []
        for rank in [rank for rank in procs.odd if rank in mesh]:
            status = procs.odd[rank]
            if status.state == "stopped":
                mesh.put(rank, "stopped", 0, stop_cause(PROCS_STOPPED))
            elif status.state != "alive":
                actions += self._fail([(mesh, rank)], status.cause or Cause(kind="exit"), ())
        return actions

    def know(self, process: str, spec: MeshSpec, incarnations: Mapping[int, int] | None = None) -> None:
        """Tracks a mesh that another `process` owns, and to which this one has a reference; notifies no owner."""
        record = self._records.meshes.get(spec.uid)
        if record is None or not (record.owner or record.process):
            mesh = MeshRecord(spec, process=process)
            mesh.begin(incarnations or {})
            self._records.add(mesh)

    def disown(self, mesh_uid: str) -> list[Action]:
        """Forgets a mesh, and the actor meshes on it, once they are stopped or unreferenced."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        actions = self._stop(mesh, "it is gone")
        for member in reversed(self._records.family(mesh) if mesh.is_procs else [mesh]):
            owner = self._tree.get(member.owner) if member.owner is not None else None
            if owner is not None:
                owner.owned.pop(member.uid, None)
            self._records.remove(member.uid)
            self._healing.intensity.forget(member.uid)
        return actions

    # Failures

    def actor_failed(
        self, mesh_uid: str, rank: int, incarnation: int, cause: Cause, awaited: Collection[str] = ()
    ) -> list[Action]:
        """Handles a failed actor in a living process. `awaited` are meshes with an awaited call at that rank."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        mesh.learn(rank, incarnation)
        return self._fail([(mesh, rank)], cause, awaited) if mesh.is_current(rank, incarnation) else []

    def proc_exited(
        self,
        mesh_uid: str,
        rank: int,
        incarnation: int,
        cause: Cause,
        awaited: Collection[str] = (),
        called: Collection[str] = (),
    ) -> list[Action]:
        """Handles the end of a process of a proc mesh, and of every actor on it."""
        procs = self._records.meshes.get(mesh_uid)
        if procs is None:
            return []
        procs.learn(rank, incarnation)
        if not procs.is_current(rank, incarnation):
            return []
        return self._fail(self._records.hit_with(procs, [rank]), cause, awaited, called)

    def host_lost(
        self,
        hosts: Collection[str],
        cause: Cause,
        awaited: Collection[str] = (),
        called: Collection[str] = (),
        loss: int = 0,
    ) -> list[Action]:
        """Handles hosts lost for one cause, with all their processes, as one failure of each family of meshes.

        `loss` is the number of that loss, and later ones have larger numbers: ranks that were healed after it are
        excluded. 0 means all.
        """
        actions: list[Action] = []
        self._records.losses.update({host: max(loss, self._records.losses.get(host, 0)) for host in hosts if loss})
        for procs in [mesh for mesh in self._records.meshes.values() if mesh.is_procs]:
            lost = {host: hit for host in hosts if (hit := self._records.lost_with(procs, host, loss))}
            ranks = sorted((hit for pairs in lost.values() for hit in pairs), key=lambda hit: hit[1])
            names = ", ".join(sorted(lost, key=lambda host: lost[host][0][1]))
            actions += self._fail(ranks, msgspec.structs.replace(cause, host=names), awaited, called)
        return actions

    def preemption_announced(self, hosts: Sequence[str], cause: Cause) -> list[Action]:
        """Warns owners with ranks on hosts that are about to be taken away, once for each family of meshes.

        The warning is passed to `__supervise__` after earlier failures; its result changes nothing. The root is warned
        otherwise.
        """
        actions: list[Action] = []
        for procs in [mesh for mesh in self._records.meshes.values() if mesh.is_procs]:
            by_owner: dict[str, list[tuple[MeshRecord, list[int]]]] = {}
            for mesh in self._records.family(procs):
                affected = [
                    rank
                    for host in hosts
                    for rank in procs.ranks_on(host)
                    if rank in mesh and mesh.at(rank).state == "alive"
                ]
                if affected and mesh.owner is not None and mesh.owner != self.root:
                    by_owner.setdefault(mesh.owner, []).append((mesh, affected))
            for owner, hit in by_owner.items():
                first, ranks = next(((mesh, affected) for mesh, affected in hit if not mesh.is_procs), hit[0])
                also = tuple(mesh.name for mesh, _ in hit if mesh is not first)
                failure = first.failure(ranks, cause, next(self._ids), also)
                now = self._tree.push(owner, RoutedFailure(failure, awaited=False))
                actions += [] if now is None else [Supervise(owner, now.failure)]
        return actions

    def found(self, mesh_uid: str, rank: int, incarnation: int) -> list[Action]:
        """Notes that a rank of an attached mesh is alive, perhaps in a later incarnation than recorded."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is not None and mesh.ended is None and rank in mesh:
            status = mesh.at(rank)
            if status.state == "alive" and incarnation > status.incarnation:
                mesh.put(rank, "alive", incarnation)
        return []

    def owner_gone(self, process: str, reason: str = "") -> list[Action]:
        """Handles the end of a process that owns meshes known here, which then have no owner."""
        suffix = f": {reason}" if reason else ""
        text = f"timed out reaching controller {process}, which owned it and is gone{suffix}"
        actions: list[Action] = []
        for mesh in [mesh for mesh in self._records.meshes.values() if mesh.process == process]:
            if mesh.ended is None:
                mesh.ended = Cause(kind="owner", text=text)
                actions.append(FailCalls(mesh.uid, None, mesh.failure((), mesh.ended)))
        return actions

    def handed_over(self, meshes: Collection[str], process: str) -> list[Action]:
        """Notes that meshes of another process are owned by this one from now on."""
        for mesh in [mesh for uid in meshes if (mesh := self._records.meshes.get(uid)) is not None and mesh.process]:
            mesh.process = process
            mesh.ended = None if mesh.ended is not None and mesh.ended.kind == "owner" else mesh.ended
        return []

    # Changes of extent and of hosts

    def grow(self, spec: MeshSpec, fresh: Collection[int]) -> list[Action]:
        """Gives a mesh owned here more ranks, which count as failed until a heal has started them.

        No owner is notified of them, and no calls are sent there before they are part of the mesh.
        """
        mesh = self._records.meshes[spec.uid]
        mesh.reshape(spec)
        for rank in fresh:
            status = mesh.odd.get(rank)
            mesh.put(rank, "failed", -1 if status is None else status.incarnation, _NOT_STARTED)
        self.intensity.forget(spec.uid, fresh)
        return []

    def grown(self, uid: str, fresh: Collection[int]) -> list[Action]:
        """Ends a growth: new ranks alive in their first incarnation lose their records and count as never healed."""
        mesh = self._records.meshes.get(uid)
        if mesh is None:
            return []
        for rank in fresh:
            status = mesh.odd.get(rank)
            if status is not None and status.state == "alive" and not status.incarnation:
                del mesh.odd[rank]
        self.intensity.forget(uid, fresh)
        return []

    def reshape(self, spec: MeshSpec, reason: str) -> list[Action]:
        """Gives a mesh other ranks, or other hosts. Calls on slices with removed ranks raise with `reason`."""
        mesh = self._records.meshes.get(spec.uid)
        if mesh is None:
            return []
        removed = mesh.reshape(spec)
        if not removed:
            return []
        actions = self.stopping(spec.uid, removed, reason)
        for rank in removed:
            cause = Cause(kind="shrunk", text=reason, actor=mesh.former[rank])
            mesh.put(rank, "stopped", mesh.odd[rank].incarnation if rank in mesh.odd else 0, cause)
        return actions

    def move(self, spec: MeshSpec) -> list[Action]:
        """Replaces the hosts of a mesh: healed ranks start on the new ones."""
        mesh = self._records.meshes.get(spec.uid)
        if mesh is not None:
            mesh.spec = msgspec.structs.replace(mesh.spec, layout=spec.layout)
        return []

    # Owners

    def owner_result(self, failure_id: int, handled: bool, raised: Cause | None = None) -> list[Action]:
        """Handles the result of `__supervise__`: whether it has handled the failure, or has raised."""
        done = self._tree.finish(failure_id)
        if done is None:
            return []
        owner, entry = done
        actions: list[Action] = []
        if (raised is not None or not handled) and not entry.failure.preempted:
            failure = entry.failure
            cause = Cause(kind="unhandled", actor=owner.name, at=failure.at, chain=failure.cause)
            if raised is not None:
                cause = msgspec.structs.replace(raised, kind="raised", actor=owner.name, chain=failure.cause)
                failure = msgspec.structs.replace(failure, cause=cause)
            if owner.actor != self.root:
                return [*self.owner_stopped(owner.actor), FailActor(owner.actor, cause)]
            actions.append(self._root_fault(failure, entry.awaited))
        following = self._tree.advance(owner)
        if following is not None:
            actions.append(Supervise(owner.actor, following.failure))
        return actions

    def owner_stopped(self, actor: str) -> list[Action]:
        """Handles any end of an actor of this process: its meshes stop first, and it gets no more notifications."""
        owned = [self._records.meshes[uid] for uid in self._tree.end(actor)]
        actions: list[Action] = []
        for mesh in owned:
            if mesh.is_procs:  # so that no heal continues with meshes that are about to stop
                actions += self._healing.cancelled(mesh)
        for mesh in owned:
            actions += self._stop(mesh, "its owner ended", ask=True)
        return actions

    def mark_reported(self, failure_id: int) -> None:
        """Notes that a call has raised this failure of the root."""
        self._awaited.pop(failure_id, None)

    def report_unclaimed(self, failure_id: int) -> list[Action]:
        """Shows, once, a failure that no call will raise, since the call is no longer awaited."""
        failure = self._awaited.pop(failure_id, None)
        return [] if failure is None else [ShowFailure(failure)]

    # Stops

    def stopping(self, mesh_uid: str, ranks: Collection[int] | None = None, reason: str = "") -> list[Action]:
        """Notes that a mesh, or some of its ranks, begin to stop: later events there are no failures."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        if ranks is None:
            return self._stop(mesh, reason or "it was stopped")
        actions: list[Action] = []
        for member, rank in self._records.hit_with(mesh, ranks):
            text = PROCS_STOPPED if member is not mesh else reason or "it was stopped"
            incarnation = (rank, member.at(rank).incarnation)
            actions += self._healing.dropped(member, [rank])
            member.put(rank, "stopped", incarnation[1], stop_cause(text))
            for actor in list(self._tree.members(member.uid, incarnation)):
                actions += self.owner_stopped(actor)
        return actions

    def stopped(self, mesh_uid: str, ranks: Collection[int] | None = None, reason: str = "") -> list[Action]:
        """Notes that a mesh, or some of its ranks, have stopped: calls that still await them will not be answered."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        actions = self.stopping(mesh_uid, ranks, reason)
        if ranks is not None:
            for member in self._records.family(mesh) if mesh.is_procs else [mesh]:
                ended = [rank for rank in ranks if rank in member and member.at(rank).state == "stopped"]
                failure = self._records.broken(member, frozenset(ended))
                if failure is not None:
                    actions.append(FailCalls(member.uid, member.incarnations(ended), failure))
            return actions
        for member in self._records.family(mesh) if mesh.is_procs else [mesh]:
            if member.ended is not None:
                actions.append(FailCalls(member.uid, None, member.failure((), member.ended)))
        return actions

    # Heals

    def detached(self, mesh_uid: str, cause: Cause) -> list[Action]:
        """Notes that procs and all actors on them belong to another process, or to none, from now on."""
        return [FailCalls(mesh.uid, None, mesh.failure((), cause)) for mesh in self._records.leave(mesh_uid, cause)]

    def heal_requested(self, mesh_uid: str, now: float, request: int, selection: Selection = None) -> list[Action]:
        """Begins to restore the failed ranks of a mesh. Each request is answered once, by Healed or HealRefused."""
        return self._healing.request(HealRequest(request, mesh_uid, selection, now))

    def respawned(self, mesh_uid: str, incarnations: Sequence[RankIncarnation]) -> list[Action]:
        """Notes restarted processes, requested here or by another owner; in the latter case actors here follow."""
        procs = self._records.meshes.get(mesh_uid)
        if procs is None:
            return []
        if procs.owner is not None:
            return self._healing.arrived(procs, incarnations)
        actions: list[Action] = []
        for rank, incarnation in incarnations:
            actions += self._note_replacement(procs, rank, incarnation)
        return [*actions, *self._healing.follow(procs, [rank for rank, _ in incarnations])]

    def came_after(self, mesh_uid: str, losses: Mapping[int, int]) -> None:
        """Notes the losses of hosts after which ranks of another owner's mesh were healed."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is not None and mesh.owner is None:
            for rank, loss in losses.items():
                mesh.since[rank] = max(loss, mesh.since.get(rank, 0))

    def recreated(self, mesh_uid: str, incarnations: Iterable[RankIncarnation]) -> list[Action]:
        """Notes re-created actors."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        if mesh.owner is not None:
            return self._healing.arrived(mesh, incarnations)
        for rank, incarnation in incarnations:
            mesh.learn(rank, incarnation, back=True)
        return []

    def heal_failed(self, mesh_uid: str, incarnations: Iterable[RankIncarnation], cause: Cause) -> list[Action]:
        """Notes incarnations that could not be started, which the heal reports at its end."""
        mesh = self._records.meshes.get(mesh_uid)
        if mesh is None:
            return []
        current = [rank for rank, incarnation in incarnations if mesh.is_current(rank, incarnation)]
        return self._fail(self._records.hit_with(mesh, current), cause)

    def _note_replacement(self, procs: MeshRecord, rank: int, incarnation: int) -> list[Action]:
        before = procs.at(rank)
        if not procs.learn(rank, incarnation, back=True) or before.state == "failed":
            return []
        # The end of the old process was not reported; its actors have ended with it.
        lost = [(mesh, rank) for mesh, rank in self._records.hit_with(procs, [rank]) if mesh is not procs]
        return self._fail(lost, Cause(kind="exit", text="it was replaced"))

    # Shared parts

    def _fail(
        self,
        hit: list[tuple[MeshRecord, int]],
        cause: Cause,
        awaited: Collection[str] = (),
        called: Collection[str] = (),
    ) -> list[Action]:
        """Fails ranks of one family of meshes, all for one reason."""
        if not hit:
            return []
        ends: list[Action] = []
        by_owner: dict[str | None, dict[int, list[MeshRecord]]] = {}
        in_heal: set[tuple[str, int]] = set()
        for mesh, rank in hit:
            if self._healing.lost(mesh, rank):
                in_heal.add((mesh.uid, rank))
            by_owner.setdefault(mesh.owner, {}).setdefault(rank, []).append(mesh)
        groups: dict[tuple[str | None, str, bool], list[int]] = {}
        for owner, by_rank in by_owner.items():
            for rank, meshes in by_rank.items():
                first = next((m for m in meshes if m.uid in awaited), None)
                first = first or next((m for m in meshes if m.uid in called), None)
                first = first or next((m for m in meshes if not m.is_procs), meshes[0])
                by_heal = any((m.uid, rank) in in_heal for m in meshes)
                groups.setdefault((owner, first.uid, by_heal), []).append(rank)
        reports: list[Action] = []
        calls: list[Action] = []
        for (owner, uid, by_heal), ranks in groups.items():
            failure_id = next(self._ids) if owner is not None else 0
            touched = {m.uid: m for rank in ranks for m in by_owner[owner][rank]}
            also = tuple(m.name for m in touched.values() if m.uid != uid)
            failure = touched[uid].failure(ranks, cause, failure_id, also)
            for mesh in touched.values():
                lost = [rank for rank in ranks if mesh in by_owner[owner][rank]]
                incarnations = mesh.incarnations(lost)
                for incarnation in incarnations:
                    mesh.put(incarnation[0], "failed", incarnation[1], cause, failure_id)
                    for actor in list(self._tree.members(mesh.uid, incarnation)):
                        ends += self.owner_stopped(actor)
                calls.append(FailCalls(mesh.uid, incarnations, mesh.failure(lost, cause, failure_id)))
            if by_heal:
                self._healing.report(touched[uid], failure)
            elif owner is not None:
                reports += self._report(failure, any(uid in awaited for uid in touched))
        return [*calls, *ends, *reports, *self._healing.settle(hit[0][0])]

    def _report(self, failure: MeshFailure, awaited: bool = False) -> list[Action]:
        mesh = self._records.meshes.get(failure.mesh_uid)
        if mesh is None or mesh.owner is None:
            return []
        if mesh.owner == self.root and not self.root_supervises:
            return [self._root_fault(failure, awaited)]
        now = self._tree.push(mesh.owner, RoutedFailure(failure, awaited))
        return [] if now is None else [Supervise(mesh.owner, now.failure)]

    def _root_fault(self, failure: MeshFailure, awaited: bool) -> RootFault:
        if self.root_policy == "script" and self._records.procs_of(failure.mesh_uid) not in self.raised_in_use:
            return RootFault(failure, "fatal")
        if not awaited:
            return RootFault(failure, "show")
        self._awaited[failure.failure_id] = failure
        return RootFault(failure, "call")

    def _stop(self, mesh: MeshRecord, text: str, *, ask: bool = False) -> list[Action]:
        """Marks a mesh and its actors as stopped; with `ask`, has the driver stop it, after the meshes that it owns."""
        if mesh.ended is not None:
            return []
        mesh.ended = stop_cause(text)
        actions = self._healing.cancelled(mesh)
        for actor in list(self._tree.members(mesh.uid)):
            actions += self.owner_stopped(actor)
        for member in self._records.on(mesh.uid):
            actions += self._stop(member, PROCS_STOPPED)
        if ask:
            actions.append(StopOwnedMesh(mesh.uid))
        return actions
