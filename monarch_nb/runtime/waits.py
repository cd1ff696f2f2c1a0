"""Deadlocks: a circle of actors that wait for each other is reported and ended instead of hanging."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from monarch_nb._deferred import asyncio
from monarch_nb._package import more
from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.calls import DeadlockError, StreamCall
from monarch_nb.runtime.context import current
from monarch_nb.runtime.future import Future
from monarch_nb.runtime.meshes import ActorState
from monarch_nb.runtime.verbs import END, PROBE, Deadlock, Probe, WaitHop
from monarch_nb.runtime.waiting import Leave, WaitObserver
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime

TICK = 0.25  # seconds a wait lasts before a probe is sent, and between checks of the waits of this process
SLOWEST = 30.0  # seconds between two probes of a long wait, at most
WIDEST = 256  # calls with more answers outstanding are not followed
REMEMBERED = 4096


class DeadlockDetector(WaitObserver):
    """Records which actors of this process wait for which calls.

    A long wait without a limit is followed from actor to actor: to those that have not answered the call, from there,
    if they are blocked themselves, to those that they wait for. Each step is checked in the process of its actor, and a
    blocked actor stays blocked while the next one does, so a path that leads back to its beginning is a deadlock and
    nothing else is. One wait of the circle, always the same, ends with a DeadlockError. Short waits cause no messages.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting: dict[ActorCell, tuple[str, float]] = {}  # call, since when; waits without a limit
        self._limited: dict[ActorCell, str] = {}  # calls of waits that end by themselves
        self._probed: dict[ActorCell, tuple[str, float, float]] = {}  # call, when next, how long after that
        self._seen_probes: OrderedDict[tuple[str, int, str, int], None] = OrderedDict()
        self._ticking = False
        self._round = 0

    def begin(self, future: Future[object], timeout: float | None) -> Leave | None:
        """Begins the wait of a thread; the returned function ends it."""
        self._runtime.node.flush()
        context = current.get()
        cell = context.actor_instance.cell if context is not None else None
        if not isinstance(cell, ActorCell) or not future.wait_id or not _holds_up(cell):
            return None
        if self._runtime.cells.get((cell.mesh, cell.rank)) is not cell:
            return None
        self._end_own(cell, future.wait_id)
        if timeout is not None:
            self._limited[cell] = future.wait_id
        else:
            self._waiting[cell] = (future.wait_id, self._runtime.clock.monotonic())
            if not self._ticking:
                self._start()

        def leave() -> None:
            (self._waiting if timeout is None else self._limited).pop(cell, None)

        return leave

    def _end_own(self, cell: ActorCell, call_id: str) -> None:
        """Ends a call of an actor to itself at once, as it can never be answered, also if the wait has a limit."""
        call = self._runtime.calls.get(call_id)
        if call is None or call.mesh != cell.mesh or (isinstance(call, StreamCall) and call.size > 1):
            return
        if cell.rank in call.missing_ranks() and not cell.is_concurrent(call.title.rpartition(".")[2]):
            description = _describe((WaitHop(self._runtime.address, call_id, _doing(cell), call.title),))
            call.fail(DeadlockError(description + more("manual/deadlocks.md")))

    def awaited_by(self, cell: "ActorCell") -> str:
        """Returns the call that an actor waits for, "" for none."""
        return self._waiting.get(cell, (self._limited.get(cell, ""), 0.0))[0]

    # -- the clock's thread -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._ticking:
                return
            self._ticking = True
        self._runtime.clock.every(TICK, self._tick)

    def _tick(self) -> bool:
        now = self._runtime.clock.monotonic()
        for cell, (call, since) in tuple(self._waiting.items()):
            if now - since < TICK:
                continue
            probed, due, pause = self._probed.get(cell, ("", 0.0, TICK))
            if probed != call:
                due, pause = now, TICK
            if now >= due:
                self._probed[cell] = (call, now + pause, min(2 * pause, SLOWEST))
                self._round += 1
                self._follow(cell, call, self._round, ())
        with self._lock:
            self._ticking = bool(self._waiting)
            if not self._ticking:
                self._probed.clear()
        return self._ticking

    def _follow(self, cell: "ActorCell", call_id: str, number: int, path: tuple[WaitHop, ...]) -> None:
        """Sends probes to the ranks that `cell` waits for."""
        call = self._runtime.calls.get(call_id)
        if call is None or (isinstance(call, StreamCall) and call.size > 1):
            return  # a stream goes on with any answer
        state = self._runtime.meshes.get(call.mesh)
        if not isinstance(state, ActorState):
            return
        missing = call.missing_ranks()
        if len(missing) > WIDEST:
            return
        hops = (*path, WaitHop(self._runtime.address, call_id, _doing(cell), call.title))
        for rank in missing:
            probe = Probe(number, call.mesh, rank, state.incarnation(rank), hops)
            try:
                self._runtime.post(state.procs.address(rank), PROBE, probe)
            except Exception:  # dead: its waiters get an error anyway
                continue

    # -- reading thread ---------------------------------------------------------------------------------------------

    def arrive(self, probe: Probe, asker: Asker[None]) -> None:
        """Follows a wait of another process for an actor here, if that actor waits, too."""
        cell = self._runtime.cells.get((probe.mesh, probe.rank))
        if cell is None or cell.incarnation != probe.incarnation:
            return
        blocked = self._waiting.get(cell)
        if blocked is None or not _holds_call(cell, probe.hops[-1].call):
            return
        index = next((n for n, hop in enumerate(probe.hops) if hop.call == blocked[0]), None)
        if index is not None:
            if index == 0:  # otherwise it is a circle further on, which its own members detect
                self._end_circle(probe.hops)
            return
        key = (probe.hops[0].call, probe.round, probe.mesh, probe.rank)
        if key in self._seen_probes:
            return
        self._seen_probes[key] = None
        while len(self._seen_probes) > REMEMBERED:
            self._seen_probes.popitem(last=False)
        self._follow(cell, blocked[0], probe.round, probe.hops)

    def _end_circle(self, hops: tuple[WaitHop, ...]) -> None:
        victim = max(hops, key=lambda hop: hop.call)
        first = hops.index(victim)
        circle = hops[first:] + hops[:first]
        self._runtime.post(victim.process, END, Deadlock(victim.call, _describe(circle)))

    def end(self, deadlock: Deadlock, asker: Asker[None]) -> None:
        """Ends a wait of this process that is part of a deadlock."""
        call = self._runtime.calls.get(deadlock.call)
        if call is not None and any(waits[0] == deadlock.call for waits in tuple(self._waiting.values())):
            call.fail(DeadlockError(deadlock.description + more("manual/deadlocks.md")))


def _describe(circle: tuple[WaitHop, ...]) -> str:
    steps = ", ".join(f"{hop.who} waits for {hop.what}" for hop in circle)
    return (
        f"deadlock: {steps}, which cannot run before {circle[0].who} is done. "
        "Make one of the endpoints a @concurrent_endpoint, or do not wait for the inner call"
    )


def _holds_up(cell: "ActorCell") -> bool:
    """Returns whether the actor's next message is delayed by the current wait."""
    thread = cell.executor.thread
    if threading.current_thread() is not thread:
        return False
    if cell.spec.kind == "sync":
        return True
    try:
        return asyncio.current_task() is cell.task
    except RuntimeError:
        return False


def _holds_call(cell: "ActorCell", call: str) -> bool:
    """Returns whether an actor runs a call, or has it in its queue, and cannot answer it while it is blocked."""
    running = cell.running
    if running is not None and running[0] == call and not cell.is_concurrent(running[1]):
        return True
    return any(header.call == call for header, _ in cell.queued())


def _doing(cell: "ActorCell") -> str:
    running = cell.running
    point = str(cell.instance.rank) if cell.spec.region.labels else ""
    return f"{cell.spec.name}{point}.{running[1] if running is not None else '__init__'}"
