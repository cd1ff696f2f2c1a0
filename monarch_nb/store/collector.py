"""What happens in an engine, as events of the store."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from monarch_nb.mesh.view import _ended
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime
from monarch_nb.store import events as e
from monarch_nb.store.failures import record
from monarch_nb.store.verbs import TOLD, WATCH, Activity, Watch
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.actions import OwnerSaid, RootFault, Supervise, Tell
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker

LOOK_S = 0.01  # what supervision does comes in bursts
FORGET_S = 30.0  # how long a mesh that has ended stays in sight


class Collector:
    """Listens to the keeper, supervision and the workers of one engine; calls `put` on their threads."""

    def __init__(self, engine: Runtime, put: Callable[[e.Event], None]) -> None:
        self._engine = engine
        self._put = put
        self.readable: Callable[[str], str] = str  # file names in tracebacks as people know them
        self._keeper = engine.keeper
        self._known: dict[str, dict[int, Any]] = {}  # of each mesh, the odd ranks as they were told
        self._ended: set[str] = set()
        self._told: set[int] = set()  # failures
        self._hit: dict[int, set[tuple[str, int]]] = {}  # by failure, what it has hit and is not back
        self._soon = False
        self._watched = False
        engine.verbs.handle(TOLD, self._activity)
        self._keeper.on_event.append(self._happened)
        self._keeper.driver.listeners.append(self._supervised)
        for state in tuple(engine.meshes.values()):
            self._spawned(state)
            self._spawning(state)
        for address, pid in tuple(self._keeper.pids.items()):
            self._started(address, pid)
        self.look()

    def close(self) -> None:
        """Listens no longer."""
        for registered, mine in (
            (self._keeper.on_event, self._happened),
            (self._keeper.driver.listeners, self._supervised),
        ):
            if mine in registered:
                registered.remove(mine)
        self._engine.verbs.release(TOLD)
        self.watch(on=False)

    # -- workers ----------------------------------------------------------------------------------------------------

    def watch(self, *, on: bool) -> None:
        """Has the workers tell of what they do, or not any more."""
        self._watched = on
        if self._engine.closed:
            return
        for state in tuple(self._engine.meshes.values()):
            if isinstance(state, ProcState) and state.born is not None and state.stopped is None:
                for rank in range(state.layout.size):
                    self._ask(state.address(rank), on=on)

    def _ask(self, address: str, *, on: bool) -> None:
        if self._keeper.pids.get(address):  # those that do not run yet are asked when they do
            try:
                self._engine.tell(address, WATCH, Watch(on))
            except TransportError:
                return  # it is gone

    def _activity(self, activity: Activity, asker: Asker[None]) -> None:
        for doing in activity.doings:
            self._put(e.Doings(*msgspec.structs.astuple(doing)))
        if activity.used is not None:
            uid, rank, _ = _place(asker.src)
            self._put(e.Usage(uid, rank, *msgspec.structs.astuple(activity.used)))

    # -- the keeper -------------------------------------------------------------------------------------------------

    def _happened(self, kind: str, about: Any) -> None:
        now = _now()
        match kind:
            case "spawned":
                self._spawned(about)
            case "spawning":
                self._spawning(about)
            case "started":
                self._started(about.address, about.pid)
            case "stopped" if isinstance(about, MeshState) and about.stopped is not None:
                self._engine.later(FORGET_S, lambda: self._forget(about))
            case "unresponsive" | "responsive":
                uid, rank, _ = _place(about.address)
                self._put(e.Answers(uid, rank, about.since if kind == "unresponsive" else None, now))
            case "host lost":
                self._put(e.HostSeen(about, why="it cannot be reached"))
            case "host back":
                self._put(e.HostSeen(about))
            case "paused" if about.call or not about.post_mortem:
                frame = about.frame
                told = {"actor": about.name, "file": frame.file, "line": frame.line, "function": frame.function}
                at = about.since or now
                self._put(e.SessionOpened(about.session, about.mesh, about.rank, at, told))
            case "resumed":
                self._put(e.SessionClosed(about.session, now))
            case _:
                return

    def _spawned(self, state: MeshState) -> None:
        born: Any = getattr(state, "born", None)
        if born is None or state.stopped is not None:
            return
        region = state.region
        ranks = self._keeper.ranks(region)
        event = e.Spawned(
            uid=state.uid,
            name=state.name,
            kind="procs" if isinstance(state, ProcState) else "actors",
            ranks=ranks,
            labels=tuple(region.labels),
            sizes=tuple(region.extent.sizes),
            offset=region.ndslice.offset,
            strides=tuple(region.ndslice.strides),
            actor_class=state.cls.__name__ if isinstance(state, ActorState) else "",
            on=state.procs.uid if isinstance(state, ActorState) else "",
            hosts=state.layout.hosts if isinstance(state, ProcState) else (),
            per_host=state.layout.per_host if isinstance(state, ProcState) else 1,
            owner=str(born.instance),
            mine=state.home == self._engine.address,
            at=_now(),
        )
        self._put(event)

    def _spawning(self, state: MeshState) -> None:
        born: Any = getattr(state, "born", None)
        if born is None:
            return

        def ready(future: Any) -> None:
            if future.exception(0) is None:
                self._put(e.Ready(state.uid, _now()))

        born.initialized._on_done(ready)

    def _started(self, address: str, pid: int) -> None:
        uid, rank, _ = _place(address)
        self._put(e.Started(uid, rank, pid, _now()))
        if self._watched:
            self._ask(address, on=True)

    def _forget(self, state: MeshState) -> None:
        for uid in (*(state.actors if isinstance(state, ProcState) else ()), state.uid):
            self._known.pop(uid, None)
            self._put(e.Forgotten(uid))

    # -- supervision ------------------------------------------------------------------------------------------------

    def _supervised(self, what: Any) -> None:
        match what:
            case None:
                if not self._soon:
                    self._soon = True
                    self._engine.later(LOOK_S, self.look)
            case Supervise(owner, failure):
                self._failed(failure)
                self._owner(failure.failure_id, owner, "asked")
            case RootFault(failure, telling):
                self._failed(failure)
                how = "asked" if telling == "call" else "shown"
                self._put(e.Told(str(failure.failure_id), "a call" if telling == "call" else "<root>", how))
            case Tell(failure):
                self._put(e.Told(str(failure.failure_id), "<root>", "shown"))
            case OwnerSaid(failure_id, owner, handled):
                self._owner(failure_id, owner, "handled" if handled else "not handled")

    def _owner(self, failure_id: int, owner: str, how: str) -> None:
        self._put(e.Told(str(failure_id), self._keeper.driver.machine.owner_name(owner), how))

    def _failed(self, failure: MeshFailure) -> None:
        if failure.failure_id in self._told or not failure.failure_id:
            return
        self._told.add(failure.failure_id)
        state = self._engine.meshes.get(failure.mesh_uid)
        ranks: list[int] = [] if state is None else list(self._keeper.ranks(state.region))
        hit = tuple(ranks[place] for place in failure.places if place < len(ranks))
        told = record(failure, _now(), self.readable)
        self._put(e.Failed(str(failure.failure_id), failure.mesh_uid, hit, told, failure))

    def look(self) -> None:
        """Tells what has changed in supervision's book since it was last looked at."""
        self._soon = False
        driver = self._keeper.driver
        with driver._lock:
            found = driver.machine.odd()
        now = _now()
        for uid, ended, odd in found:
            known = self._known.setdefault(uid, {})
            for rank, status in odd.items():
                if known.get(rank) is not status:
                    self._turned(uid, rank, status, now)
            self._known[uid] = odd
            if ended is not None and uid not in self._ended:
                self._ended.add(uid)
                self._put(e.Ended(uid, ended.text or ended.kind, now, ended.kind != "stopped"))
                for failure_id, hit in tuple(self._hit.items()):
                    self._over(failure_id, {one for one in hit if one[0] == uid}, "stopped", now)

    def _turned(self, uid: str, rank: int, status: Any, now: float) -> None:
        cause, failure_id = status.cause, status.failure_id
        at = round(cause.at, 3) if cause is not None and cause.at and status.state == "failed" else now
        detail = _ended(cause) if cause is not None and status.state == "failed" else ""
        failure = str(failure_id) if failure_id and status.state in ("failed", "healing") else ""
        self._put(e.Turned(uid, rank, status.state, status.incarnation, at, detail, failure))
        place = (uid, rank)
        if failure:
            self._hit.setdefault(failure_id, set()).add(place)
            self._put(e.Settled(failure, "healing" if status.state == "healing" else "open", now))
        for other, hit in tuple(self._hit.items()):
            if place in hit and (not failure or other != failure_id):
                self._over(other, {place}, "stopped" if status.state == "stopped" else "healed", now)

    def _over(self, failure_id: int, places: set[tuple[str, int]], how: e.FailureState, now: float) -> None:
        left = self._hit[failure_id]
        left -= places
        if not left:
            del self._hit[failure_id]
            self._put(e.Settled(str(failure_id), how, now))


def _place(address: str) -> tuple[str, int, int]:
    """Proc mesh, rank and incarnation of a process."""
    uid, _, rest = address.partition("/")[2].partition(".")
    rank, _, life = rest.partition(".")
    return uid, int(rank or 0), int(life or 0)


def _now() -> float:
    return round(time.time(), 3)
