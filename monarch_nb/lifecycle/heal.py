"""heal_mesh: restores failed ranks of a mesh."""

import threading
import time
from collections.abc import Callable, Collection, Set
from typing import TypeVar

from monarch_nb.lifecycle.elastic import ended_hosts, replace_hosts, source_of, spares_for
from monarch_nb.lifecycle.interrupts import doing
from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.mesh.handle import Handle, operations, region_of, state_of
from monarch_nb.mesh.host_record import GROW_S
from monarch_nb.mesh.mesh_events import MeshEvents
from monarch_nb.runtime import MeshState, current_runtime, proc_state_of
from monarch_nb.supervision import Driver, HealError

M = TypeVar("M")
ROUNDS = 4
_REPORTED_S = 1.0  # for the death of a rank that does not answer
_BACK_S = 5.0  # for a host that may return: a restarted agent is ready after a second


def heal_mesh(
    mesh: M, *, timeout: float | None = None, kill: bool = False, shrink: bool = False, replace: bool | None = None
) -> M:
    """Restores the failed ranks of a mesh (or slice) and returns the very same object. Blocks until they are ready.

    Lost processes are started again, with their set-up; their actors are re-created with the newest class and their
    original arguments; all references to them, anywhere, work again. Calls that were under way have failed and are not
    repeated; tensors of a mesh for tensors are restored if each part of them is on a living rank. With `kill` the
    processes of living ranks are killed first, with all their actors, for ranks that do not react to an interrupt.
    Raises HealError if ranks fail again, or have been healed too often (3 times in 60 s).

    A spare host of the job replaces a lost one at once. If there is no spare, and the job reports that the host has
    ended, the job is asked for another one, which is announced first; with `replace` also for hosts that may return,
    with `replace=False` for none. A host that may return, as the job reports, is awaited for 5 s. Raises
    NoMoreHostsError if hosts are missing after `timeout`, or ten minutes, or if the job's scheduler does not answer.

    With `shrink` nothing is started: the result is a smaller mesh for tensors, the largest slice of this one without a
    lost rank. The original mesh can no longer be used then.
    """
    if shrink:
        shrunk: Callable[[], M] | None = getattr(mesh, "shrunk", None)  # of a mesh for tensors
        if shrunk is None or isinstance(mesh, Handle):
            raise TypeError(
                f"heal_mesh(shrink=True) takes a mesh for tensors, not {type(mesh).__name__}: of other meshes "
                "take a slice without the lost ranks"
            )
        return shrunk()
    procs = mesh if isinstance(mesh, Handle) else getattr(mesh, "procs", None)  # of a mesh for tensors
    if not isinstance(procs, Handle):
        raise TypeError(f"heal_mesh takes a proc or actor mesh, or one for tensors, not {type(mesh).__name__}")
    state, region = state_of(procs), region_of(procs)
    if state.stopped is not None:
        raise RuntimeError(state.end_text)
    deadline = None if timeout is None else time.monotonic() + timeout
    if not kill:
        _notice_deaths(state, set(region.ranks()))
    lost = _lost_hosts(state, region.ranks())
    for attempt in range(ROUNDS):
        rest = None if deadline is None else max(0.0, deadline - time.monotonic())
        previous, hint = lost, _replace(state, lost, rest, ask=replace)
        try:
            current_runtime().part(MeshHealer).heal(state, region, kill=kill).get(rest)
        except HealError as error:
            # The processes of a host may end before it is known that the host is lost.
            if hint and attempt < ROUNDS - 1 and _await_return(lost, _BACK_S if rest is None else min(rest, _BACK_S)):
                lost = _lost_hosts(state, region.ranks())
                continue
            lost = _lost_hosts(state, region.ranks()) or _ended_hosts(state, region.ranks(), ask=replace)
            if attempt == ROUNDS - 1 or not (_has_spares(state) if set(lost) <= set(previous) else _has_job(state)):
                raise (HealError(f"{hint}\n{error}", error.failures) if hint else error) from None
            continue
        kill = False
        # Ranks often die together, and the second death may be reported after the heal of the first has begun.
        if current_runtime().part(Driver).failed(state.uid).isdisjoint(region.ranks()):
            break
    return mesh


def kill_mesh(mesh: Handle[MeshState]) -> None:
    """Kills the processes of a mesh (or slice), with all their actors; `heal_mesh` starts them again.

    Calls that wait for them fail. Blocks until they have ended. Raises RuntimeError for a mesh that was stopped, or
    that another process owns.
    """
    runtime, state = current_runtime(), state_of(mesh)
    procs = proc_state_of(state)
    if state.stopped is not None:
        raise RuntimeError(f"{state.name} was stopped ({state.stopped}): it has no processes to kill")
    if procs.owner_process != runtime.address:
        raise RuntimeError(f"{procs.name} belongs to {procs.owner_process}: only its owner can kill its processes")
    runtime.part(MeshHealer).kill(procs, sorted(region_of(mesh).ranks()), "on request", shown=False).get()


def _notice_deaths(state: MeshState, ranks: Set[int]) -> None:
    """Blocks until ranks have answered or are known to have failed, for about a second at most.

    Without it, a rank that has just been killed would not be healed, since its death is still to be reported.
    """
    driver, uid = current_runtime().part(Driver), proc_state_of(state).uid
    if not (driver.failed(uid) | driver.failed(state.uid)).isdisjoint(ranks):
        return
    silent = ranks - doing(state, sorted(ranks)).get().keys()
    if silent:
        _wait_for_events(lambda: silent <= driver.failed(uid), _REPORTED_S)


def _wait_for_events(is_over: Callable[[], bool], seconds: float) -> bool:
    """Blocks until a condition holds, checked at events of meshes and hosts, or the time is over; returns its value."""
    changed, deadline = threading.Event(), time.monotonic() + seconds
    listeners = current_runtime().part(MeshEvents).listeners
    listeners.append(lambda event: changed.set())
    listen = listeners[-1]
    try:
        while not (over := is_over()) and (remaining := deadline - time.monotonic()) > 0:
            changed.wait(remaining)
            changed.clear()
    finally:
        listeners.remove(listen)
    return over


def _await_return(hosts: Collection[str], seconds: float) -> bool:
    """Returns whether all lost hosts can be used again; blocks for at most `seconds`."""
    return _wait_for_events(lambda: not operations().lost_hosts(hosts), seconds)


def _hosts_of_failed(state: MeshState, ranks: Collection[int]) -> list[str]:
    procs = proc_state_of(state)
    failed = current_runtime().part(Driver).failed(procs.uid)
    return list(dict.fromkeys(procs.layout.host_of(rank) for rank in sorted(failed.intersection(ranks))))


def _lost_hosts(state: MeshState, ranks: Collection[int]) -> list[str]:
    """Returns the hosts of failed ranks that cannot be reached."""
    return list(operations().lost_hosts(_hosts_of_failed(state, ranks)))


def _ended_hosts(state: MeshState, ranks: Collection[int], *, ask: bool | None) -> list[str]:
    """Returns the hosts of failed ranks that have ended, as their job reports, before that is observed here."""
    if ask is False:
        return []
    return ended_hosts(proc_state_of(state), _hosts_of_failed(state, ranks))


def _replace(state: MeshState, lost: list[str], timeout: float | None, *, ask: bool | None) -> str:
    if not lost:
        return ""
    return replace_hosts(proc_state_of(state), lost, GROW_S if timeout is None else timeout, ask=ask)


def _has_job(state: MeshState) -> bool:
    return source_of(proc_state_of(state)) is not None


def _has_spares(state: MeshState) -> bool:
    return bool(spares_for(proc_state_of(state)))
