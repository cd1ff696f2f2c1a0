"""The execution of heals: starts processes again, re-creates actors, and notifies survivors."""

import logging
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from monarch_nb.code.reload import ClassVersions
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs as host_verbs
from monarch_nb.lifecycle.actor_spawn import ActorSpawnSpec, spawn_frames
from monarch_nb.lifecycle.proc_spawn import ProcSpawnSpec, choose_master, renew_world, start
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.mesh.handle import operations
from monarch_nb.mesh.host_record import giver_of
from monarch_nb.mesh.mesh_events import Event, MeshHealed, MeshResized, RanksStarting
from monarch_nb.mesh.requests import request, settle
from monarch_nb.mesh.sending import encode_arguments, send_each
from monarch_nb.mesh.verbs import HEAL_MESH, HealMesh
from monarch_nb.runtime import (
    ANEW,
    HOOK,
    SPAWN,
    ActorState,
    Future,
    MeshState,
    PendingCall,
    ProcState,
    Runtime,
    fail_future,
    pending_future,
    ranks_of,
    resolve_future,
    resolved_future,
    when_done,
)
from monarch_nb.shape import Region, region_of_ranks, runs
from monarch_nb.supervision import Cause, Driver, HealError, RankIncarnation, SupervisionError
from monarch_nb.transport import held_back
from monarch_nb.wire import Asker, Done, agent_of, host_name, text_of

logger = logging.getLogger(__name__)
_GIVEN_UP = "it is no part of its mesh any more"
_RETURN_S = 10.0  # until all processes know of a restarted agent


class MeshHealer:
    """Executes supervision's decisions on heals of meshes that are owned here."""

    def __init__(
        self,
        runtime: Runtime,
        driver: Driver,
        *,
        updates: ReferenceUpdates,
        versions: ClassVersions,
        stopper: MeshStopper,
        publish: Callable[[Event], None],
        await_host: Callable[[str, float], None],
    ) -> None:
        """`publish` takes events for displays; `await_host` blocks while a returned host cannot be used yet."""
        self._runtime, self._driver = runtime, driver
        self._updates, self._versions, self._stopper = updates, versions, stopper
        self._publish, self._await_host = publish, await_host
        self._reinitialized: set[str] = set()  # actor meshes whose `__init__` must run on all ranks
        self._runtime.verbs.handle(HEAL_MESH, self._on_heal)

    def heal(self, state: MeshState, region: Region, *, kill: bool = False) -> Future[None]:
        """Restores failed ranks of a slice, for any owner of the mesh; fails with HealError.

        With `kill` the processes of living ranks are ended first, and healed with all their actors.
        """
        if kill and isinstance(state, ActorState):
            state = state.procs
        if state.owner_process == self._runtime.address:
            if kill:
                return held_back(lambda: self._kill_and_heal(state, region.ranks(), await_hooks=True))
            return self._driver.heal(state.uid, runs(region))
        future: Future[None] = pending_future(describe=lambda: f"{state.name} is being healed")

        def done(reply: Future[Done]) -> None:
            error = reply.exception(0)
            if error is None:
                resolve_future(future, None)
            else:
                fail_future(future, HealError(text_of(error)))

        body = HealMesh(state.uid, tuple(region.ranks()), kill)
        when_done(request(self._runtime, state.owner_process, HEAL_MESH, body), done)
        return future

    def _on_heal(self, body: HealMesh, asker: Asker[Done]) -> None:
        state = self._runtime.meshes.get(body.uid)

        def answer(future: Future[None]) -> None:
            error = future.exception(0)
            if error is None:
                asker.reply(Done())
            else:
                asker.refuse(text_of(error))

        # The sender may be a survivor itself, busy until the heal is done: its hook runs after that.
        if body.kill and state is not None:
            when_done(self._kill_and_heal(state, body.ranks, await_hooks=False), answer)
            return
        when_done(self._driver.heal(body.uid, frozenset(body.ranks), await_hooks=False), answer)

    def kill(self, state: ProcState, ranks: Sequence[int], reason: str, *, shown: bool = True) -> Future[None]:
        """Kills processes, which is an ordinary failure for their owner; resolves when they have ended.

        Without `shown` calls that wait for them fail, and nothing else is shown, as the kill was requested.
        """
        fail = self._driver.proc_exited if shown else self._driver.killed
        return self._kill(state, ranks, Cause(kind="killed", text=reason), fail)

    def _kill(
        self, state: ProcState, ranks: Sequence[int], cause: Cause, fail: Callable[[str, int, int, Cause], None]
    ) -> Future[None]:
        lost = self._driver.lost_ranks(state.uid)
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            if rank not in lost:
                host = state.layout.host_of(rank)
                by_host.setdefault(host, []).append(state.address(rank))
                rank_cause = msgspec.structs.replace(cause, host=host, at=time.time())
                fail(state.uid, rank, state.incarnation(rank), rank_cause)
        requests: list[Future[object]] = []
        for host, addresses in by_host.items():
            body = p.Stop(tuple(addresses), timeout_s=0.0, reason=cause.text, grace_s=0.0)
            requests.append(request(self._runtime, agent_of(host), host_verbs.STOP, body))
        return settle(requests, lambda: f"processes of {state.name} have not ended yet")

    def _kill_and_heal(self, state: MeshState, ranks: Sequence[int], *, await_hooks: bool) -> Future[None]:
        assert isinstance(state, ProcState)
        driver = self._driver
        cause = Cause(kind="signal", text="killed so that it is started again", signal=9)
        killed = self._kill(state, ranks, cause, driver.killed)
        result: Future[None] = pending_future(describe=lambda: f"{state.name} is being healed")

        def done(future: Future[None]) -> None:
            error = future.exception(0)
            resolve_future(result, None) if error is None else fail_future(result, error)

        def ended(_: Future[None]) -> None:  # devices and ports are free now
            when_done(driver.heal(state.uid, frozenset(ranks), await_hooks=await_hooks), done)

        when_done(killed, ended)
        return result

    # -- on separate threads ----------------------------------------------------------------------------------------

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again, including their set-up; blocks until they are ready."""
        state = self._runtime.meshes[uid]
        assert isinstance(state, ProcState)
        hosts = {state.layout.host_of(rank) for rank, _ in incarnations}
        for host in hosts:
            self._await_host(host, _RETURN_S)
        self._check_hosts(state, hosts)
        _renew(state, incarnations)
        choose_master(state)
        self._publish(RanksStarting(state, frozenset(hosts)))
        try:
            ready = start(self._runtime, state, incarnations)
        finally:  # a stop makes it fail, but some agents may have been asked already
            if state.stopped is not None:  # the last requests may arrive after the stop
                self._stopper.stop_again(state)
            elif not _are_needed(state, incarnations):
                ranks = region_of_ranks(["rank"], [len(incarnations)], _ranks(incarnations))
                self._stopper.stop(state, _GIVEN_UP, ranks)
        ready.get()
        if isinstance(state.spawn_spec, ProcSpawnSpec):
            state.spawn_spec.initialized = resolved_future(True)
        self._renew_groups(state, _ranks(incarnations))

    def _check_hosts(self, state: ProcState, hosts: Collection[str]) -> None:
        """Raises SupervisionError if nothing can be started again because a host is lost."""
        for host, reason in operations().lost_hosts(hosts).items():
            cause = Cause(kind="host", text=reason, host=host, at=time.time(), giver=giver_of(host))
            failure = self._driver.machine.describe(state.uid, list(state.layout.ranks_on(host)), cause)
            raise SupervisionError(f"its host {host_name(host)} is lost: {reason}", failure=failure)

    def _renew_groups(self, state: ProcState, ranks: Sequence[int]) -> None:
        """Gives up process groups of torch.distributed with lost ranks; new ones have another address."""
        region = state.pending_region or state.region
        back = [region.point_of_base_rank(rank).rank for rank in ranks if state.incarnation(rank)]
        self._reinitialized |= renew_world(self._runtime, state, back).get()

    def _reinitialize_survivors(
        self, state: ActorState, spawn_spec: ActorSpawnSpec, fresh: Sequence[int]
    ) -> PendingCall[object] | None:
        """Runs `__init__` of survivors again if it joins a process group, together with the re-created actors."""
        if state.uid not in self._reinitialized:
            return None
        self._reinitialized.discard(state.uid)
        lost = self._driver.lost_ranks(state.uid)
        survivors = [rank for rank in state.ranks if rank not in fresh and rank not in lost]
        if not survivors:
            return None
        title = f"{state.name}.__init__"
        logger.warning(
            "%s: __init__ runs again on all ranks, as it joins a process group that the lost ranks were in", state.name
        )
        body = encode_arguments(title, (spawn_spec.cls, spawn_spec.arguments), {})
        call = PendingCall(
            self._runtime, title, state.uid, lambda: survivors, len(survivors), lambda replies: [r() for r in replies]
        )
        send_each(self._runtime, self._runtime.root_context, state, survivors, ANEW, body, call)
        return call

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Re-creates actors of the newest class with their original arguments; blocks until they are ready."""
        state = self._runtime.meshes[uid]
        assert isinstance(state, ActorState)
        spawn_spec = state.spawn_spec
        assert isinstance(spawn_spec, ActorSpawnSpec)  # it was spawned here
        spawn_spec.renew()
        if state.cls is not spawn_spec.cls:
            state.cls, state.kind = spawn_spec.cls, spawn_spec.spec.kind
            self._versions.publish(state)
        _renew(state, incarnations)
        ranks = [rank for rank, _ in incarnations]
        frames = spawn_frames(spawn_spec.cls, spawn_spec.arguments, spawn_spec.spec)
        call = PendingCall(
            self._runtime, f"{state.name}.__init__", uid, lambda: ranks, len(ranks), lambda replies: None
        )
        send_each(self._runtime, self._runtime.root_context, state, ranks, SPAWN, frames, call, ordered=False)
        survivors = self._reinitialize_survivors(state, spawn_spec, ranks)
        if state.stopped is not None:
            self._stopper.stop_again(state)
        call.future.get()
        if survivors is not None:
            survivors.future.get()
        spawn_spec.initialized = resolved_future(None)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Notifies all holders of references, then runs the hooks of survivors; raises the first error of these."""
        self._apply_pending_extents(incarnations)
        self._updates.healed(incarnations)
        errors: list[BaseException] = []
        for uid, back in incarnations:
            state = self._runtime.meshes.get(uid)
            if isinstance(state, ActorState):
                call = self._notify_survivors(state, back)
                error = call.future.exception() if call is not None and await_hooks else None
                errors += [] if error is None else [error]  # the hooks of other meshes run nevertheless
            if state is not None:
                self._publish(MeshHealed(state, tuple(back)))
        if errors:
            raise errors[0]

    def _apply_pending_extents(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]]) -> None:
        """Gives growing meshes their new extent once all new processes and actors are ready."""
        back = {uid: set(_ranks(entries)) for uid, entries in incarnations}
        for procs in [mesh for uid in back if isinstance(mesh := self._runtime.meshes.get(uid), ProcState)]:
            growing = [mesh for mesh in (procs, *procs.actors.values()) if mesh.pending_region is not None]
            if all(
                set(ranks_of(mesh.pending_region or mesh.region)) <= {*mesh.ranks, *back.get(mesh.uid, ())}
                for mesh in growing
            ):
                for mesh in growing:
                    with mesh.lock:
                        mesh.region, mesh.pending_region, mesh.resized = mesh.pending_region or mesh.region, None, True
                        mesh.version += 1
                    self._publish(MeshResized(mesh))

    def _notify_survivors(self, state: ActorState, back: Sequence[RankIncarnation]) -> PendingCall[object] | None:
        if getattr(getattr(state.cls, HOOK), "_monarch_default", False):
            return None
        fresh = {rank for rank, _ in back if rank in state.region}
        lost = self._driver.lost_ranks(state.uid)
        survivors = [rank for rank in state.ranks if rank not in fresh and rank not in lost]
        if not survivors or not fresh:
            return None
        points = [state.region.point_of_base_rank(rank) for rank in sorted(fresh)]
        frames = encode_arguments(f"{state.name}.{HOOK}", (points,), {})
        call = PendingCall(
            self._runtime,
            f"{state.name}.{HOOK}",
            state.uid,
            lambda: survivors,
            len(survivors),
            lambda replies: [reply() for reply in replies],
        )
        send_each(self._runtime, self._runtime.root_context, state, survivors, HOOK, frames, call)
        return call


def _ranks(incarnations: Sequence[RankIncarnation]) -> list[int]:
    return [rank for rank, _ in incarnations]


def _are_needed(state: MeshState, incarnations: Sequence[RankIncarnation]) -> bool:
    """Returns whether these ranks are, or will be, part of the mesh: its growth may have been cancelled."""
    return all(rank in (state.pending_region or state.region) for rank in _ranks(incarnations))


def _renew(state: MeshState, incarnations: Sequence[RankIncarnation]) -> None:
    with state.lock:
        if state.stopped is not None:
            raise RuntimeError(f"{state.name} was stopped while it was being healed")
        if not _are_needed(state, incarnations):
            raise RuntimeError(_GIVEN_UP)
        state.incarnations = {**state.incarnations, **{rank: life for rank, life in incarnations if life}}
        state.version += 1
