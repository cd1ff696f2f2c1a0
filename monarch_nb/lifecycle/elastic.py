"""Growing and shrinking: hosts come from a job and go back to it, and meshes of processes follow."""

import contextvars
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from monarch_nb.lifecycle import extents
from monarch_nb.lifecycle.notices import show_host_message
from monarch_nb.lifecycle.proc_spawn import host_mesh_of
from monarch_nb.lifecycle.resizing import RemovedPart, resizer
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.mesh.handle import Handle, region_of, state_of
from monarch_nb.mesh.host import HostMesh
from monarch_nb.mesh.host_record import HostRecord, HostSource, NoMoreHostsError, RecordedSource, record_with
from monarch_nb.mesh.operations import operations
from monarch_nb.mesh.resized import Resized, leaving_positions, more_of
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
    """Grows a mesh of processes onto hosts: those that its host mesh has free, then new ones of the job."""
    state, until = state_of(procs), time.monotonic() + timeout
    _check_whole(procs, state, "grow")
    wanted = more_of(more, extents.dimension_of_hosts(state), state.name)
    hosts, back = _found(state, wanted, timeout)
    try:
        actors = resizer().grow(state, hosts, max(1.0, until - time.monotonic()))
    except BaseException:
        back()
        raise
    return Resized(state.name, dict(state.region.extent), tuple(hosts), actors)


def shrink_procs(procs: Handle[ProcState], fewer: Mapping[str, object]) -> Resized:
    """Removes hosts from a mesh; those that no other mesh of this process uses go back to the job. Blocks."""
    state = state_of(procs)
    _check_whole(procs, state, "shrink")
    places = leaving_positions(fewer, extents.dimension_of_hosts(state), state.name, state.hosts)
    going, resized = {state.hosts[place] for place in places}, list[Resized]()

    def shrink() -> None:
        there = [place for place, host in enumerate(state.hosts) if host in going]
        if not there:
            raise ValueError(f"{state.name} has removed these hosts already")
        left = resizer().shrink(state, there)
        record = _record_of(state)
        freed = _freed(record, left.hosts)
        _end(record, [left], freed)
        resized.append(Resized(state.name, dict(state.region.extent), left.hosts, left.actors, left.places, freed))

    _whole(shrink, state.name)
    return resized[0]


def grow_hosts(record: HostRecord, more: Mapping[str, object], timeout: float) -> Resized:
    """Adds hosts to a host mesh."""
    wanted = more_of(more, _dimension(record), record.name)
    if not isinstance(wanted, (int, tuple)):
        raise TypeError(f"{record.name}.grow takes a number of hosts, or names, not {type(wanted).__name__}")
    hosts = _more(record, wanted, timeout)
    return Resized(record.name, dict(record.region.extent), hosts)


def shrink_hosts(record: HostRecord, fewer: Mapping[str, object]) -> Resized:
    """Returns hosts of a host mesh to the job, after stopping what this process has there."""
    known = record.hosts
    places = leaving_positions(fewer, _dimension(record), record.name, known)
    going = tuple(known[place] for place in places)
    if len(going) == len(known):
        raise ValueError(
            f"{record.name} has {counted(len(known), 'host')}: at least one must stay; shutdown() ends them all"
        )
    record.giver("shrink")
    shown, names = record.places(going), list[str]()

    def shrink() -> None:
        lefts, ends = list[RemovedPart](), list[Future[None]]()
        for state in _living_on(going):
            there = [place for place, host in enumerate(state.hosts) if host in going]
            if len(there) == len(state.hosts):
                names.append(state.name)
                ends.append(current_runtime().part(MeshStopper).stop(state, f"{record.name} has removed {shown}"))
            else:
                lefts.append(resizer().shrink(state, there))
                names.extend(lefts[-1].actors)
        _end(record, lefts, going, ends)

    _whole(shrink, record.name)
    return Resized(record.name, dict(record.region.extent), going, tuple(names), shown, going)


def spares_for(state: ProcState) -> tuple[str, ...]:
    """Returns the spare hosts that can replace one that the mesh has lost."""
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
    """Returns those of its hosts that have ended for good, as their job reports. Raises NoMoreHostsError."""
    source = source_of(state)
    return [] if source is None else [host for host, fate in source.fate(hosts).items() if fate.ended]


def replace_hosts(state: ProcState, dead: Sequence[str], timeout: float, *, ask: bool | None = True) -> str:
    """Replaces lost hosts by spares or, if it may `ask`, by new ones of the job.

    With `ask` None it asks only for replacements of hosts that have ended, as the job reports. Returns advice, in one
    line, about lost hosts that may come back; empty if there are none. Raises NoMoreHostsError.
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
    gone: list[str] = []
    try:
        with record.replacing:  # never for long: spares are there at once, whoever waits for other hosts
            known, lacking = _replaced(record, dead)
            spares = giver.take_spares(lacking) if lacking else {}
            gone += spares
            for host, new in spares.items():
                record.swap(host, new)
        instead = {**known, **spares}
        if instead:
            resizer().replace(state, instead)
        missing, why, waits = _to_ask(state, giver, [host for host in dead if host not in instead], ask)
        if missing:
            with record.changing:
                instead, lacking = _replaced(record, missing)  # another mesh may have asked meanwhile
                if lacking:
                    _say_asked(state, giver, lacking, why)
                    asked = dict(zip(lacking, giver.more(len(lacking), timeout, instead=lacking), strict=True))
                    gone += asked
                    for host, new in asked.items():
                        record.swap(host, new)
                    instead.update(asked)
            resizer().replace(state, instead)
        return waits
    finally:
        if gone:
            run_in_background(lambda: _tidy(giver, gone), "lost hosts are being returned")


def _to_ask(
    state: ProcState, giver: HostSource, lost: Sequence[str], ask: bool | None
) -> tuple[list[str], dict[str, str], str]:
    """Returns the hosts for which the job is asked, why these have ended, and advice about the others."""
    if ask is not None or not lost:
        return list(lost) if ask else [], {}, ""
    fates = giver.fate(lost)
    stay = [host for host in lost if not fates[host].ended]
    lines = [
        f"host {host_name(host)} is lost, and may come back, as {giver} says: {fates[host].description}"
        for host in stay
    ]
    if lines:
        name = state.name
        lines.append(
            f"heal_mesh({name}) starts again what was there once it is back; heal_mesh({name}, replace=True) asks for "
            "another host at once"
        )
    ended = {host: fates[host].description.partition("\n")[0] for host in lost if fates[host].ended}
    return list(ended), ended, "\n".join(lines)


def _say_asked(state: ProcState, giver: HostSource, lost: Sequence[str], why: Mapping[str, str]) -> None:
    """Informs the user first: replacing a host may take long, and cost."""
    names = ", ".join(f"{host_name(host)} ({why[host]})" if host in why else host_name(host) for host in lost)
    others = "another host" if len(lost) == 1 else f"{len(lost)} other hosts"
    show_host_message(f"{state.name} has lost {names}: {giver} is asked for {others}")


def _replaced(record: HostRecord, dead: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns usable replacements that these lost hosts have by now, and the hosts without one."""
    instead = {host: record.instead[host] for host in dead if host in record.instead}
    lost = operations().lost_hosts(instead.values())
    instead = {host: new for host, new in instead.items() if new not in lost}
    return instead, [host for host in dead if host not in instead]


def _tidy(giver: HostSource, gone: Sequence[str]) -> None:
    giver.give_back(gone)
    giver.refill()


# -- helpers ----------------------------------------------------------------------------------------------------


def _check_whole(procs: Handle[ProcState], state: ProcState, what: str) -> None:
    if region_of(procs) != state.region:
        raise ValueError(f"only a whole mesh can {what}, not a slice of {state.name}")


def _record_of(state: ProcState, timeout: float = 0.0) -> HostRecord | None:
    return record_with(host_mesh_of(state), state.hosts, timeout)


def _found(state: ProcState, wanted: object, timeout: float) -> tuple[list[str], Callable[[], None]]:
    """Returns hosts that a mesh can grow onto, and a function that gives back those that came for it."""
    if isinstance(wanted, HostMesh):
        ids = wanted.host_ids
        return [ids[rank] for rank in wanted.region.ranks()], lambda: None
    if not isinstance(wanted, (int, tuple)):
        raise TypeError(
            f"{state.name}.grow takes a number of hosts, names of machines, or a HostMesh, not {type(wanted).__name__}"
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
    if isinstance(wanted, int):
        free = free[:wanted]
        lacking = wanted - len(free)
    else:
        free = [each for each in wanted if each in (*free, *state.hosts)]  # hosts of the mesh are rejected below
        lacking = tuple(each for each in wanted if each not in free)
    new = _more(record, lacking, timeout) if lacking else ()

    def back() -> None:
        if new:
            run_in_background(lambda: _end(record, [], new), "hosts are being given back")

    return [*free, *new], back


def _more(record: HostRecord, wanted: "int | Sequence[str]", timeout: float) -> tuple[str, ...]:
    giver = record.giver("grow")
    with record.changing:
        new = giver.more(wanted, timeout)
        record.take(new)
    return new


def _dimension(record: HostRecord) -> str:
    if len(record.region.labels) != 1:
        raise ValueError(f"{record.name} has {len(record.region.labels)} dimensions: only a line of hosts can change")
    return record.region.labels[0]


def _living_on(hosts: Collection[str]) -> list[ProcState]:
    runtime = current_runtime()
    states = [each for each in tuple(runtime.meshes.values()) if isinstance(each, ProcState)]
    mine = [
        each
        for each in states
        if each.spawn_spec is not None and each.stopped is None and each.owner_process == runtime.address
    ]
    return [each for each in mine if not set(hosts).isdisjoint(each.hosts)]


def _freed(record: HostRecord | None, hosts: Collection[str]) -> tuple[str, ...]:
    """Returns those of them that no other mesh of this process uses, and that a job takes back."""
    if record is None or record.source is None:
        return ()
    busy = {host for state in _living_on(hosts) for host in state.hosts}
    return tuple(host for host in hosts if host in record.hosts and host not in busy)


def _end(
    record: HostRecord | None,
    lefts: Collection[RemovedPart],
    freed: Collection[str],
    ends: "Collection[Future[None]]" = (),
) -> None:
    """Waits for the end of what was stopped, then gives hosts back to the job."""
    for stopped in (*(left.stopped for left in lefts), *ends):
        stopped.exception()
    if record is not None and record.source is not None and freed:
        with record.changing:
            record.drop(freed)
            record.source.give_back(tuple(freed))


def _whole(shrink: Callable[[], object], name: str) -> None:
    """Runs a release of hosts to its end; blocks. An interrupt ends only the wait."""
    try:
        run_in_background(shrink, f"{name} lets hosts go").get()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped waiting; {name} lets these hosts go all the same") from stop


def run_in_background(function: Callable[[], T], description: str) -> Future[T]:
    """Runs a function on a thread of its own: an interrupt ends the wait, not the work."""
    done: Future[T] = pending_future(describe=lambda: description)
    context = contextvars.copy_context()

    def run() -> None:
        try:
            resolve_future(done, context.run(function))
        except BaseException as error:
            fail_future(done, error)

    threading.Thread(target=run, name="monarch-hosts", daemon=True).start()
    return done
