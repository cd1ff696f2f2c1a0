"""Growing and shrinking: hosts are taken from a job and returned to it, and meshes of processes follow."""

import contextvars
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from monarch_nb.lifecycle import extents
from monarch_nb.lifecycle.proc_spawn import host_mesh_of
from monarch_nb.lifecycle.resizing import RemovedPart, resizer
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.watching import show_host_message
from monarch_nb.mesh.handle import Handle, operations, region_of, state_of
from monarch_nb.mesh.host import HostMesh
from monarch_nb.mesh.host_record import (
    HostRecord,
    HostSource,
    NoMoreHostsError,
    RecordedSource,
    Resized,
    leaving_positions,
    more_of,
    record_with,
)
from monarch_nb.runtime import (
    ActorState,
    Future,
    ProcState,
    current_runtime,
    fail_future,
    pending_future,
    resolve_future,
)
from monarch_nb.wire import counted, host_name

T = TypeVar("T")


def grow_procs(procs: Handle[ProcState], more: Mapping[str, object], timeout: float) -> Resized:
    """Grows a mesh of processes onto hosts: free ones of its host mesh, then new ones of the job."""
    state, deadline = state_of(procs), time.monotonic() + timeout
    _check_whole(procs, state, "grow")
    target = more_of(more, extents.dimension_of_hosts(state), state.name)
    hosts, give_back = _hosts_for_growth(state, target, timeout)
    try:
        actors = resizer().grow(state, hosts, max(1.0, deadline - time.monotonic()))
    except BaseException:
        give_back()
        raise
    return Resized(state.name, dict(state.region.extent), tuple(hosts), actors)


def shrink_procs(procs: Handle[ProcState], fewer: Mapping[str, object]) -> Resized:
    """Removes hosts from a mesh; hosts that no other mesh of this process uses are returned to the job. Blocks."""
    state = state_of(procs)
    _check_whole(procs, state, "shrink")
    positions = leaving_positions(fewer, extents.dimension_of_hosts(state), state.name, state.hosts)
    leaving, resized = {state.hosts[position] for position in positions}, list[Resized]()

    def shrink() -> None:
        indices = [index for index, host in enumerate(state.hosts) if host in leaving]
        if not indices:
            raise ValueError(f"{state.name} has removed these hosts already")
        part = resizer().shrink(state, indices)
        record = _record_of(state)
        freed = _freed_hosts(record, part.hosts)
        _release(record, [part], freed)
        resized.append(Resized(state.name, dict(state.region.extent), part.hosts, part.actors, part.places, freed))

    _complete(shrink, state.name)
    return resized[0]


def grow_hosts(record: HostRecord, more: Mapping[str, object], timeout: float) -> Resized:
    """Adds hosts to a host mesh."""
    target = more_of(more, _dimension(record), record.name)
    if not isinstance(target, (int, tuple)):
        raise TypeError(f"{record.name}.grow takes a number of hosts, or names, not {type(target).__name__}")
    hosts = _add_hosts(record, target, timeout)
    return Resized(record.name, dict(record.region.extent), hosts)


def shrink_hosts(record: HostRecord, fewer: Mapping[str, object]) -> Resized:
    """Returns hosts of a host mesh to the job, after stopping the meshes that this process has there."""
    hosts = record.hosts
    positions = leaving_positions(fewer, _dimension(record), record.name, hosts)
    leaving = tuple(hosts[position] for position in positions)
    if len(leaving) == len(hosts):
        raise ValueError(
            f"{record.name} has {counted(len(hosts), 'host')}: at least one must stay; shutdown() ends them all"
        )
    record.giver("shrink")
    label, names = record.places(leaving), list[str]()

    def shrink() -> None:
        parts, ends = list[RemovedPart](), list[Future[None]]()
        for state in _living_on(leaving):
            indices = [index for index, host in enumerate(state.hosts) if host in leaving]
            if len(indices) == len(state.hosts):
                names.append(state.name)
                ends.append(current_runtime().part(MeshStopper).stop(state, f"{record.name} has removed {label}"))
            else:
                parts.append(resizer().shrink(state, indices))
                names.extend(parts[-1].actors)
        _release(record, parts, leaving, ends)

    _complete(shrink, record.name)
    return Resized(record.name, dict(record.region.extent), leaving, tuple(names), label, leaving)


def spares_for(state: ProcState) -> tuple[str, ...]:
    """Returns the spare hosts that can replace a lost host of the mesh."""
    source = source_of(state)
    return () if source is None else source.waiting


def source_of_mesh(mesh: object) -> HostSource | None:
    """Returns the source of a mesh's hosts; takes any kind of mesh. Raises NoMoreHostsError."""
    if isinstance(mesh, HostMesh):
        source = mesh.record.source
    else:
        handle = mesh if isinstance(mesh, Handle) else getattr(mesh, "procs", None)
        state = state_of(handle) if isinstance(handle, Handle) else None
        state = state.procs if isinstance(state, ActorState) else state
        source = source_of(state) if isinstance(state, ProcState) else None
    return source.opened() if isinstance(source, RecordedSource) else source


def source_of(state: ProcState) -> HostSource | None:
    """Returns the source of a mesh's hosts, or None if none is known here."""
    record = _record_of(state)
    return None if record is None else record.source


def ended_hosts(state: ProcState, hosts: Sequence[str]) -> list[str]:
    """Returns the hosts of a mesh that have ended for good, as their job reports. Raises NoMoreHostsError."""
    source = source_of(state)
    return [] if source is None else [host for host, fate in source.fate(hosts).items() if fate.ended]


def replace_hosts(state: ProcState, dead: Sequence[str], timeout: float, *, ask: bool | None = True) -> str:
    """Replaces lost hosts by spares or, if it may `ask`, by new ones of the job.

    With `ask` None it asks only for replacements of hosts that have ended, as the job reports. Returns advice, in one
    line, about lost hosts that may return; empty if there are none. Raises NoMoreHostsError.
    """
    record = _record_of(state, timeout if ask else 0.0)
    if not ask and (record is None or record.source is None):
        return ""
    if record is None:
        raise NoMoreHostsError(
            f"{state.name} has lost {', '.join(dead)}, and nothing is known here of who gives its hosts: load the job "
            "first, with job_load(…).state()"
        )
    giver = record.giver("have another host in the place of one that is lost")
    replaced: list[str] = []
    try:
        with record.replacing:  # never for long: spares are available at once, even while others wait for new hosts
            existing, lacking = _replacements_of(record, dead)
            spares = giver.take_spares(lacking) if lacking else {}
            replaced += spares
            for host, new in spares.items():
                record.swap(host, new)
        replacements = {**existing, **spares}
        if replacements:
            resizer().replace(state, replacements)
        missing, reasons, advice = _missing(state, giver, [host for host in dead if host not in replacements], ask)
        if missing:
            with record.changing:
                replacements, lacking = _replacements_of(record, missing)  # another mesh may have asked meanwhile
                if lacking:
                    _announce_request(state, giver, lacking, reasons)
                    new_hosts = dict(zip(lacking, giver.more(len(lacking), timeout, instead=lacking), strict=True))
                    replaced += new_hosts
                    for host, new in new_hosts.items():
                        record.swap(host, new)
                    replacements.update(new_hosts)
            resizer().replace(state, replacements)
        return advice
    finally:
        if replaced:
            run_in_background(lambda: _give_back(giver, replaced), "lost hosts are being returned")


def _missing(
    state: ProcState, giver: HostSource, lost: Sequence[str], ask: bool | None
) -> tuple[list[str], dict[str, str], str]:
    """Returns the hosts to request from the job, the reasons for their ends, and advice about the others."""
    if ask is not None or not lost:
        return list(lost) if ask else [], {}, ""
    fates = giver.fate(lost)
    remaining = [host for host in lost if not fates[host].ended]
    lines = [
        f"host {host_name(host)} is lost, and may come back, as {giver} says: {fates[host].description}"
        for host in remaining
    ]
    if lines:
        name = state.name
        lines.append(
            f"heal_mesh({name}) starts again what was there once it is back; heal_mesh({name}, replace=True) asks for "
            "another host at once"
        )
    ended = {host: fates[host].description.partition("\n")[0] for host in lost if fates[host].ended}
    return list(ended), ended, "\n".join(lines)


def _announce_request(state: ProcState, giver: HostSource, lost: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Informs the user first: replacing a host may take long, and cost."""
    names = ", ".join(f"{host_name(host)} ({reasons[host]})" if host in reasons else host_name(host) for host in lost)
    phrase = "another host" if len(lost) == 1 else f"{len(lost)} other hosts"
    show_host_message(f"{state.name} has lost {names}: {giver} is asked for {phrase}")


def _replacements_of(record: HostRecord, dead: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the present usable replacements of these lost hosts, and the hosts without one."""
    replacements = {host: record.instead[host] for host in dead if host in record.instead}
    lost = operations().lost_hosts(replacements.values())
    replacements = {host: new for host, new in replacements.items() if new not in lost}
    return replacements, [host for host in dead if host not in replacements]


def _give_back(giver: HostSource, hosts: Sequence[str]) -> None:
    giver.give_back(hosts)
    giver.refill()


# -- helpers ----------------------------------------------------------------------------------------------------


def _check_whole(procs: Handle[ProcState], state: ProcState, operation: str) -> None:
    if region_of(procs) != state.region:
        raise ValueError(f"only a whole mesh can {operation}, not a slice of {state.name}")


def _record_of(state: ProcState, timeout: float = 0.0) -> HostRecord | None:
    return record_with(host_mesh_of(state), state.hosts, timeout)


def _hosts_for_growth(state: ProcState, target: object, timeout: float) -> tuple[list[str], Callable[[], None]]:
    """Returns hosts onto which a mesh can grow, and a function that returns newly requested ones."""
    if isinstance(target, HostMesh):
        ids = target.host_ids
        return [ids[rank] for rank in target.region.ranks()], lambda: None
    if not isinstance(target, (int, tuple)):
        raise TypeError(
            f"{state.name}.grow takes a number of hosts, names of machines, or a HostMesh, not {type(target).__name__}"
        )
    record = _record_of(state, timeout)
    if record is None:
        raise NoMoreHostsError(
            f"{state.name} cannot grow: nothing is known here of who gives its hosts. Load the job first, with "
            "job_load(…).state(), or name the hosts: mesh.grow(hosts=attach_to_workers(…))"
        )
    if isinstance(record.source, RecordedSource):
        record.source.opened()  # attaches the hosts that no mesh uses
    lost = operations().lost_hosts(record.hosts)
    free = [host for host in record.hosts if host not in state.hosts and host not in lost]
    lacking: int | tuple[str, ...]
    if isinstance(target, int):
        free = free[:target]
        lacking = target - len(free)
    else:
        free = [host for host in target if host in (*free, *state.hosts)]  # hosts of the mesh are rejected below
        lacking = tuple(host for host in target if host not in free)
    new = _add_hosts(record, lacking, timeout) if lacking else ()

    def give_back() -> None:
        if new:
            run_in_background(lambda: _release(record, [], new), "hosts are being given back")

    return [*free, *new], give_back


def _add_hosts(record: HostRecord, target: "int | Sequence[str]", timeout: float) -> tuple[str, ...]:
    giver = record.giver("grow")
    with record.changing:
        new = giver.more(target, timeout)
        record.take(new)
    return new


def _dimension(record: HostRecord) -> str:
    if len(record.region.labels) != 1:
        raise ValueError(f"{record.name} has {len(record.region.labels)} dimensions: only a line of hosts can change")
    return record.region.labels[0]


def _living_on(hosts: Collection[str]) -> list[ProcState]:
    runtime = current_runtime()
    states = [state for state in tuple(runtime.meshes.values()) if isinstance(state, ProcState)]
    owned = [
        state
        for state in states
        if state.spawn_spec is not None and state.stopped is None and state.owner_process == runtime.address
    ]
    return [state for state in owned if not set(hosts).isdisjoint(state.hosts)]


def _freed_hosts(record: HostRecord | None, hosts: Collection[str]) -> tuple[str, ...]:
    """Returns the hosts that no other mesh of this process uses, and that a job takes back."""
    if record is None or record.source is None:
        return ()
    busy = {host for state in _living_on(hosts) for host in state.hosts}
    return tuple(host for host in hosts if host in record.hosts and host not in busy)


def _release(
    record: HostRecord | None,
    parts: Collection[RemovedPart],
    freed: Collection[str],
    ends: "Collection[Future[None]]" = (),
) -> None:
    """Waits for the end of the stopped parts, then returns hosts to the job."""
    for stopped in (*(part.stopped for part in parts), *ends):
        stopped.exception()
    if record is not None and record.source is not None and freed:
        with record.changing:
            record.drop(freed)
            record.source.give_back(tuple(freed))


def _complete(shrink: Callable[[], object], name: str) -> None:
    """Runs a release of hosts to its end; blocks. An interrupt ends only the wait."""
    try:
        run_in_background(shrink, f"{name} lets hosts go").get()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped waiting; {name} lets these hosts go all the same") from stop


def run_in_background(function: Callable[[], T], description: str) -> Future[T]:
    """Runs a function on its own thread: an interrupt ends the wait, not the work."""
    done: Future[T] = pending_future(describe=lambda: description)
    context = contextvars.copy_context()

    def run() -> None:
        try:
            resolve_future(done, context.run(function))
        except BaseException as error:
            fail_future(done, error)

    threading.Thread(target=run, name="monarch-hosts", daemon=True).start()
    return done
