"""The meshes that a process owns or references, and their form in messages.

A handle pickles as its region and the form of its record by `proc_form` or `actor_form`; the receiver's `proc_record`
or `actor_record` returns the record there. A process follows a mesh from its first reference on.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from monarch_nb.mesh.handle import operations
from monarch_nb.mesh.mesh_events import Event, MeshSpawned
from monarch_nb.mesh.verbs import ACTOR_FAILED
from monarch_nb.runtime import ActorState, Instance, MeshState, ProcState, Runtime, current_runtime, ranks_of
from monarch_nb.runtime.actors.actor import Kind
from monarch_nb.shape import Region
from monarch_nb.supervision import Action, ActorEnd, Driver, MeshSpec, SupervisionMachine
from monarch_nb.transport import held_back
from monarch_nb.wire import Asker, Layout, host_of

S = TypeVar("S", bound=MeshState)


class MeshRegistry:
    """Registers the meshes of this process with supervision and with their owners."""

    def __init__(
        self,
        runtime: Runtime,
        driver: Driver,
        *,
        watch: Callable[..., None],
        subscribe: Callable[[MeshState], None],
        forget_processes: Callable[[str], None],
        forget_holders: Callable[[str], None],
        publish: Callable[[Event], None],
        revive: Callable[[Iterable[str]], None] = lambda hosts: None,
        runner: str,
        python: str | None = None,
    ) -> None:
        """`watch` makes agents report the ends of processes, `subscribe` requests updates from the owner of a mesh.

        `forget_processes` and `forget_holders` end both for a mesh that was stopped long ago. `publish` takes events
        for displays; `revive` starts dead agents of this machine again.

        `runner` is the main function of new processes, as `module:function`.
        """
        self._runtime, self._driver, self._watch, self._subscribe = runtime, driver, watch, subscribe
        self._forget_processes, self._forget_holders = forget_processes, forget_holders
        self._publish = publish
        self.revive = revive
        self.runner = runner
        self.python = python  # the interpreter this process was asked to run with, which its own processes use too
        self.agent_environment: dict[str, dict[str, str]] = {}
        self.workspaces: dict[str, list[str]] = {}  # by host: folders of code that come first on the path there
        self._started_in: ProcState | None = None
        self._owned: dict[str, list[str]] = {}  # stream of the owner -> uids
        runtime.verbs.handle(ACTOR_FAILED, self._actor_failed)

    @property
    def started_in(self) -> ProcState | None:
        """The mesh that this process belongs to, from its set-up; None for a controller."""
        return self._started_in

    @property
    def started_by(self) -> str:
        """The process that started this one, "" for a controller."""
        return "" if self._started_in is None else self._started_in.owner_process

    @property
    def is_left(self) -> bool:
        """True while the mesh of this process is detached from its starter, and attached to no other process."""
        return self.started_by in self._runtime.local.away

    # -- meshes that this process owns or references ----------------------------------------------------------------

    def spec_of(self, state: MeshState) -> MeshSpec:
        """Returns the specification of a mesh for supervision, with the extent that it is growing to."""
        region = state.pending_region or state.region
        shape = (tuple(region.extent.labels), tuple(region.extent.sizes))
        if isinstance(state, ProcState):
            return MeshSpec(
                uid=state.uid, name=state.name, kind="procs", ranks=ranks_of(region), extent=shape, layout=state.layout
            )
        assert isinstance(state, ActorState)
        return MeshSpec(
            uid=state.uid, name=state.name, kind="actors", ranks=ranks_of(region), extent=shape, on=state.procs.uid,
            lineage=state.lineage,
        )  # fmt: skip

    def own(self, instance: Instance, state: MeshState) -> None:
        """Registers a mesh that an actor of this process has spawned, and its owner."""
        held_back(self._own, instance, state)

    def _own(self, instance: Instance, state: MeshState) -> None:
        self._runtime.meshes[state.uid] = state
        if isinstance(state, ActorState):
            state.procs.actors[state.uid] = state
        self._owned.setdefault(instance.stream, []).append(state.uid)
        incarnation = (instance.base_rank, instance.incarnation) if instance.mesh else None

        def register(machine: SupervisionMachine) -> list[Action]:
            machine.join(instance.stream, str(instance), instance.mesh or None, incarnation)
            return machine.own(instance.stream, self.spec_of(state), state.incarnations)

        self._driver.feed(register)
        self._publish(MeshSpawned(state))

    def renew(
        self,
        state: MeshState,
        incarnations: dict[int, int],
        version: int,
        region: Region | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Updates the record of a mesh whose owner has healed ranks of it, or given it another extent."""
        if not state.renew(incarnations, version, region):
            return
        is_moved = isinstance(state, ProcState) and layout is not None and layout != state.layout
        if isinstance(state, ProcState) and layout is not None:
            state.layout = layout
        if region is not None or is_moved:
            self.reshape(state, f"{state.name} has shrunk")

    def reshape(self, state: MeshState, reason: str) -> None:
        """Gives supervision the extent and the hosts of a mesh from its record."""
        spec = self.spec_of(state)
        self._driver.feed(lambda machine: machine.reshape(spec, reason))

    def disown(self, state: MeshState, uids: "Sequence[str]") -> None:
        """Forgets a mesh of this process that was stopped long ago, with the actors on it."""
        self._driver.feed(lambda machine: machine.disown(state.uid))
        for uid in uids:
            self._forget_holders(uid)
            for owned in tuple(self._owned.values()):
                if uid in owned:
                    owned.remove(uid)
        if isinstance(state, ProcState):
            self._forget_processes(state.uid)

    def subscribe(self, state: MeshState) -> None:
        """Subscribes to failures, heals and the end of a mesh that is owned elsewhere and now referenced here."""

        def register(machine: SupervisionMachine) -> list[Action]:
            machine.know(state.owner_process, self.spec_of(state), state.incarnations)
            return []

        self._driver.feed(register)
        if self._runtime.closed or state.owner_process == self._runtime.address:
            return
        self._subscribe(state)
        procs = state if isinstance(state, ProcState) else None
        self._watch(state.owner_process, *(map(procs.address, procs.ranks) if procs is not None else ()))

    def belongs(self, state: ProcState) -> None:
        """Sets the mesh that this process is part of."""
        self._started_in = state

    def owned_by(self, instance: Instance) -> Sequence[str]:
        """Removes and returns the meshes that an ending actor owns, the oldest first."""
        return self._owned.pop(instance.stream, ())

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _actor_failed(self, end: ActorEnd, asker: Asker[None]) -> None:
        self._runtime.node.settled(self._driver.on_actor_end, end)  # after its earlier answers


Common = tuple[str, str, Region, str, dict[int, int], int, str | None]  # the region is that of the version
ProcForm = tuple[Common, Layout]
ActorForm = tuple[Common, ProcForm, type, Kind]

_lock = threading.Lock()


def _common(state: MeshState) -> Common:
    with state.lock:
        return (
            state.uid,
            state.name,
            state.region,
            state.owner_process,
            dict(state.incarnations),
            state.version,
            state.stopped,
        )


def proc_form(state: ProcState) -> ProcForm:
    """Returns the form of a mesh of processes in messages."""
    return _common(state), state.layout


def actor_form(state: ActorState) -> ActorForm:
    """Returns the form of a mesh of actors in messages."""
    return _common(state), proc_form(state.procs), state.cls, state.kind


def proc_record(form: ProcForm) -> ProcState:
    """Returns this process's record of a mesh of processes. Raises UnreachableError for hosts that are out of reach."""
    common, layout = form
    uid, name, _, owner, *_ = common
    runtime = current_runtime()
    if uid not in runtime.meshes:
        operations().reach((host_of(owner), *layout.hosts), name)
    return _record(runtime, common, ProcState, layout=layout)


def actor_record(form: ActorForm) -> ActorState:
    """Returns this process's record of a mesh of actors. Raises UnreachableError for hosts that are out of reach."""
    common, procs, cls, kind = form
    return _record(current_runtime(), common, ActorState, procs=proc_record(procs), cls=cls, kind=kind)


def _record(runtime: Runtime, common: Common, record: type[S], **fields: Any) -> S:
    uid, name, region, owner, incarnations, version, stopped = common
    with _lock:
        state = runtime.meshes.get(uid)
        if state is None:
            state = runtime.meshes[uid] = record(uid, name, region, owner, incarnations, version, stopped, **fields)
            try:
                operations().refer(state)
            except BaseException:  # its end would never be reported: the next reference tries again
                del runtime.meshes[uid]
                raise
        else:
            new_region = region if region != state.region else None
            runtime.part(MeshRegistry).renew(state, incarnations, version, new_region, fields.get("layout"))
    assert isinstance(state, record)
    return state
