"""Growing meshes of processes onto more hosts, and shrinking them, with the actors on them."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from monarch_nb.host.protocol import Launch
from monarch_nb.lifecycle import extents
from monarch_nb.lifecycle.actor_spawn import ActorSpawnSpec
from monarch_nb.lifecycle.proc_spawn import ProcSpawnSpec, choose_master, renew_world
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.mesh.mesh_events import Event, MeshResized
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ActorState, Future, MeshState, ProcState, Runtime, current_runtime, resolved_future
from monarch_nb.settings import settings
from monarch_nb.shape import Region, RegionForm, first_places_of, region_of_ranks
from monarch_nb.supervision import Driver, HealError, SupervisionMachine
from monarch_nb.transport import held_back


class RemovedPart(Struct, frozen=True):
    """The part of a mesh that was removed by shrinking it."""

    places: str  # such as "hosts=2-3", in the former extent
    hosts: tuple[str, ...]  # ids
    actors: tuple[str, ...]  # names of the meshes that had actors there
    stopped: Future[None]  # resolves when everything there has ended


class MeshResizer:
    """Changes the extents of meshes that this process owns, one change of a mesh at a time."""

    def __init__(
        self,
        runtime: Runtime,
        driver: Driver,
        *,
        registry: MeshRegistry,
        updates: ReferenceUpdates,
        stopper: MeshStopper,
        publish: Callable[[Event], None],
    ) -> None:
        """`publish` takes events for displays."""
        self._runtime, self._driver = runtime, driver
        self._registry, self._updates, self._stopper, self._publish = registry, updates, stopper, publish
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._ending: dict[str, Future[None]] = {}  # ends of removed parts, whose ranks are reused

    def grow(self, state: ProcState, hosts: Sequence[str], timeout: float | None) -> tuple[str, ...]:
        """Starts processes on more hosts, and on them the actors of all meshes that cover this one.

        Blocks until all are ready; then the mesh, and these meshes of actors, have the new extent. Returns the names of
        the latter.
        Raises HealError if any of them does not start, or TimeoutError; the mesh is unchanged then.
        """
        with self._locks[state.uid]:
            self._check(state, "grow")
            self._ending.get(state.uid, resolved_future(None)).exception(settings.mesh_terminate_timeout)
            actors, former = _covering_actors(state), state.region
            growth = extents.growth(state, hosts)
            spawn_spec = state.spawn_spec
            assert isinstance(spawn_spec, ProcSpawnSpec)
            launch = extents.launches(state.name, spawn_spec.launch, state.layout.per_host, growth.layout.size)
            try:
                held_back(self._begin, state, actors, growth, launch)
                self._driver.heal(state.uid, frozenset(growth.fresh)).get(timeout)
                if state.pending_region is not None:
                    raise HealError("what is new has ended again")
            except BaseException as error:
                stopped = held_back(self._take_back, state, actors, growth, former)
                unchanged = f"{state.name} has not grown, and is as it was before"
                if isinstance(error, HealError):
                    stopped.exception(settings.mesh_terminate_timeout)
                    raise HealError(f"{unchanged}: {error}", error.failures) from error
                if isinstance(error, TimeoutError):
                    raise TimeoutError(f"{unchanged}: what is new was not there within {timeout:g} s") from error
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(f"{unchanged}: what is new is stopped") from error
                raise
            for mesh in (state, *actors):
                self._driver.feed(partial(SupervisionMachine.grown, uid=mesh.uid, fresh=growth.fresh))
            return tuple(mesh.name for mesh in actors if not mesh.inner)

    def shrink(self, state: ProcState, positions: Collection[int]) -> RemovedPart:
        """Removes hosts by their indices: later calls go to the others, and the removed ranks are stopped in order.

        Blocks until all holders of references know the new extent, or do not react; not until everything has stopped.
        """
        with self._locks[state.uid]:
            self._check(state, "shrink")
            remaining, removed = extents.shrinkage(state, positions)
            ranks = removed.ranks()
            leaving = [state.region.point_of_base_rank(rank).rank for rank in ranks]
            label = first_places_of(state.region, ranks)
            hosts = tuple(dict.fromkeys(map(state.layout.host_of, ranks)))
            names = [mesh.name for mesh in _living(state) if not mesh.inner and mesh.region.overlaps_ranks(ranks)]
            meshes: list[MeshState] = [state, *_covering_actors(state)]
            held_back(self._set_region, meshes, remaining, f"{state.name} has shrunk, and {label} was removed")
            self._updates.healed([(mesh.uid, ()) for mesh in meshes])
            stopped = self._ending[state.uid] = self._stopper.stop(state, f"{state.name} has removed {label}", removed)
            held_back(self._renew_world, state, leaving)
            return RemovedPart(label, hosts, tuple(names), stopped)

    def replace(self, state: ProcState, hosts: dict[str, str]) -> None:
        """Replaces hosts: heals start lost ranks there from now on."""
        with self._locks[state.uid]:
            self._check(state, "heal")
            layout = state.layout
            names = tuple(hosts.get(host, host) for host in layout.hosts)
            with state.lock:
                state.layout = msgspec.structs.replace(layout, hosts=names)
                state.resized, state.version = True, state.version + 1
            self._driver.feed(lambda machine: machine.move(self._registry.spec_of(state)))
            self._publish(MeshResized(state))

    def _check(self, state: ProcState, verb: str) -> None:
        if state.stopped is not None:
            raise RuntimeError(state.end_text)
        if state.owner_process != self._runtime.address or not isinstance(state.spawn_spec, ProcSpawnSpec):
            raise RuntimeError(f"{state.name} belongs to another process: {verb} it in the process that spawned it")

    # -- with interrupts held back ----------------------------------------------------------------------------------

    def _begin(
        self, state: ProcState, actors: Sequence[ActorState], growth: extents.GrownLayout, launch: tuple[Launch, ...]
    ) -> None:
        assert isinstance(state.spawn_spec, ProcSpawnSpec)
        state.layout, state.spawn_spec.launch = growth.layout, launch
        for mesh in (state, *actors):
            mesh.pending_region = growth.region
            _set_actor_region(mesh, growth.region)
            self._driver.feed(partial(SupervisionMachine.grow, spec=self._registry.spec_of(mesh), fresh=growth.fresh))

    def _take_back(
        self, state: ProcState, actors: Sequence[ActorState], growth: extents.GrownLayout, former: Region
    ) -> Future[None]:
        reason, grown = f"{state.name} was to grow, and has not", list[MeshState]()
        for mesh in (state, *actors):
            with mesh.lock:
                mesh.pending_region = None
            if mesh.region == growth.region:  # all had started, and survivors were being notified
                grown.append(mesh)
        if state.stopped is not None:
            return resolved_future(None)
        self._set_region(grown, former, reason)
        for actor in actors:
            _set_actor_region(actor, former)
        for mesh in (state, *actors):
            self._registry.reshape(mesh, reason)
        choose_master(state)
        renew_world(self._runtime, state, ())  # earlier ranks may have received a larger one
        if grown:
            updates = [(mesh.uid, ()) for mesh in grown]
            threading.Thread(target=self._updates.healed, args=(updates,), name="monarch-resized", daemon=True).start()
        fresh = region_of_ranks(["rank"], [len(growth.fresh)], growth.fresh)
        self._ending[state.uid] = stopped = self._stopper.stop(state, f"{state.name} has not grown", fresh)
        return stopped

    def _renew_world(self, state: ProcState, leaving: Sequence[int]) -> None:
        choose_master(state)
        renew_world(self._runtime, state, leaving).get()

    def _set_region(self, meshes: Sequence[MeshState], region: Region, reason: str) -> None:
        for mesh in meshes:
            with mesh.lock:
                mesh.region, mesh.resized, mesh.version = region, True, mesh.version + 1
            _set_actor_region(mesh, region)
            self._registry.reshape(mesh, reason)
            self._publish(MeshResized(mesh))


def _living(state: ProcState) -> list[ActorState]:
    return [mesh for mesh in tuple(state.actors.values()) if mesh.stopped is None]


def _covering_actors(state: ProcState) -> list[ActorState]:
    """Returns the meshes of actors that cover the whole mesh and are owned here."""
    return [
        mesh for mesh in _living(state) if mesh.region == state.region and isinstance(mesh.spawn_spec, ActorSpawnSpec)
    ]


def _set_actor_region(state: MeshState, region: Region) -> None:
    """Sets the extent for actors that are created from now on."""
    if isinstance(state.spawn_spec, ActorSpawnSpec):
        state.spawn_spec.spec = msgspec.structs.replace(state.spawn_spec.spec, region=RegionForm.of(region))


def resizer() -> MeshResizer:
    """Returns this process's resizer."""
    return current_runtime().part(MeshResizer)
