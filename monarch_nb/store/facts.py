"""Facts about the meshes of a runtime, as events of the store."""

import time
from collections.abc import Iterator

from monarch_nb.lifecycle.notices import HostNotices
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, proc_state_of
from monarch_nb.shape import RegionForm
from monarch_nb.store import events as e
from monarch_nb.supervision import Cause, Driver, RankStatus
from monarch_nb.supervision.report import facts as report_facts
from monarch_nb.wire import parse_address


def now() -> float:
    """The time as in events."""
    return round(time.time(), 3)


def rank_of(address: str) -> tuple[str, int]:
    """Proc mesh and base rank of a process."""
    uid, rank, _ = parse_address(address).place
    return uid, rank


def is_ready(state: MeshState) -> bool:
    """True once the start of a mesh has ended, its set-up code or constructors, also where one of them has failed."""
    return state.spawn_spec is None or state.spawn_spec.initialized.done()


def mesh_description(runtime: Runtime, state: MeshState, *, ready: bool = False) -> e.MeshDescription:
    """The event for a spawned mesh."""
    spawn_spec = state.spawn_spec
    form = RegionForm.of(state.region)
    procs = isinstance(state, ProcState)
    return e.MeshDescription(
        uid=state.uid,
        name=state.name,
        kind="procs" if procs else "actors",
        ranks=state.ranks,
        labels=form.labels,
        sizes=form.sizes,
        offset=form.offset,
        strides=form.strides,
        picked=form.ranks,
        actor_class=state.cls.__name__ if isinstance(state, ActorState) else "",
        on=state.procs.uid if isinstance(state, ActorState) else "",
        inner=state.inner,
        hosts=state.hosts if isinstance(state, ProcState) else (),
        per_host=state.layout.per_host if isinstance(state, ProcState) else 1,
        owner="" if spawn_spec is None else str(spawn_spec.instance),
        mine=state.owner_process == runtime.address,
        ready=ready,
        at=now(),
    )


def rank_state_changed(uid: str, rank: int, status: RankStatus, at: float) -> e.RankStateChanged:
    """The event for the condition of a rank in supervision."""
    cause, failed = status.cause, status.state == "failed"
    return e.RankStateChanged(
        uid,
        rank,
        status.state,
        status.incarnation,
        round(cause.at, 3) if failed and cause is not None and cause.at else at,
        end_text(cause) if failed and cause is not None else "",
        str(status.failure_id) if status.failure_id and status.state in ("failed", "healing") else "",
    )


def end_text(cause: Cause) -> str:
    """The reason for the end of a rank, in a few words."""
    origin = cause.origin
    ended = dict(report_facts(origin)).get("ended", "")
    if ended:
        used = f"; it used {origin.memory}" if origin.memory else ""
        return f"it ended {ended}" + (f", out of memory{used}" if origin.oom else "")
    lines = (origin.text or cause.text or cause.kind).strip().splitlines()
    return lines[0] if lines else cause.kind


def facts_of(runtime: Runtime, state: MeshState) -> Iterator[e.Event]:
    """All facts about one mesh and, for actors, about their processes: for callers without a store that listens."""
    watcher = runtime.part(ProcessWatcher)
    procs = proc_state_of(state)
    states: list[MeshState] = [procs] if procs is state else [procs, state]
    for shown in states:
        yield mesh_description(runtime, shown, ready=is_ready(shown))
    for noticed in runtime.part(HostNotices).of(procs.hosts):
        yield e.HostSeen(noticed.host, notice=noticed.by, until=noticed.until or 0.0)
    for rank in procs.ranks:
        address = procs.address(rank)
        if address in watcher.pids:
            yield e.ProcessStarted(procs.uid, rank, watcher.pids[address], now())
        if address in watcher.unresponsive:
            yield e.ResponsivenessChanged(procs.uid, rank, watcher.unresponsive[address], now())
    for rank in state.region.ranks():
        held = runtime.held_at(state.uid, rank)
        if held:
            yield e.SessionOpened(f"{state.uid}.{rank}", state.uid, rank, now(), {"place": held})
    for shown in states:
        for uid, ended, odd in runtime.part(Driver).ranks_not_alive(shown.uid):
            for rank, status in odd.items():
                yield rank_state_changed(uid, rank, status, now())
            if ended is not None:
                yield e.MeshEnded(uid, ended.text or ended.kind, now(), ended.kind != "stopped")
        if shown.stopped is not None:
            yield e.MeshEnded(shown.uid, shown.stopped, now())
