"""The store of one process: holds the state, sends changes to watchers, and describes meshes."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from monarch_nb.mesh import Handle, region_of, state_of
from monarch_nb.runtime import MeshState, Runtime, current_runtime
from monarch_nb.shape import Region
from monarch_nb.store.cluster import ClusterState
from monarch_nb.store.collector import Collector, Pending, facts_of, now
from monarch_nb.store.events import Event, WatchersLeft
from monarch_nb.store.history import UsageHistory
from monarch_nb.store.mesh_view import MeshView
from monarch_nb.store.records import Document, FailureFields

J = TypeVar("J")
SEND_S = 0.05  # between two deltas,
FULL_S, FULL = 0.1, 40  # and if so many ranks change at once, since each message has a cost,
RECORDS_PER_S = 20_000  # and longer after a delta with many ranks: a page processes at most so many records a second
WAITING = 500  # unwatched events are folded in batches of this size

Message = dict[str, object]
Listener = Callable[[Message], None]
logger = logging.getLogger(__name__)
Followers = tuple[tuple[frozenset[type], Callable[[Event], object]], ...]


class Store:
    """State of the cluster; methods from any thread.

    Without watchers no thread runs, and workers report at most their use of resources, for `history`.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._cluster = ClusterState()
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()  # of the cluster, its number, and the watchers
        self._watchers: list[Listener] = []
        self._followers: Followers = ()
        self._following = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sent = 0  # records of ranks in the last delta
        self.seq = 0
        self.history = UsageHistory()
        self.collector = None if runtime is None else Collector(runtime, self.put, self.history)

    def put(self, event: Event) -> None:
        """Queues an event. Does not block."""
        self._events.append(event)
        for kinds, follower in self._followers:
            if type(event) in kinds:
                follower(event)
        if self._thread is not None:
            if not self._wake.is_set():
                self._wake.set()
        elif len(self._events) >= WAITING:
            with self._lock:
                self._fold()

    def follow(self, follower: Callable[[Event], object], *kinds: type) -> Callable[[], None]:
        """Calls `follower` with each event of these types, on the thread that puts it; call the result to end that.

        The follower must not block. Workers report no more than without it.
        """
        self._change_followers(lambda before: (*before, (frozenset(kinds), follower)))
        return lambda: self._change_followers(
            lambda before: tuple(entry for entry in before if entry[1] is not follower)
        )

    def _change_followers(self, change: Callable[[Followers], Followers]) -> None:
        """Replaces the followers. A finalizer may do so, on a thread that holds the lock, or is in here already."""
        with self._following:
            while True:
                before = self._followers
                after = change(before)
                if self._followers is before:
                    self._followers = after
                    return

    def keep_history(self) -> None:
        """Has processes report their use of resources from now on, once in a few seconds, even without watchers."""
        if self.collector is not None:
            self.collector.measure()

    def document(self) -> Document:
        """Returns a copy of the current state."""
        if self.collector is not None:
            self.collector.refresh()
        with self._lock:
            self._fold()
            return _copy(self._cluster.document)

    def mesh_view(self, uid: str, region: Region) -> MeshView | None:
        """Returns the current view of a mesh or its slice `region`; None if the store does not contain it."""
        if self.collector is not None:
            self.collector.refresh()
        with self._lock:
            self._fold()
            return self._cluster.mesh_view(uid, region, time.time())

    def event_of(self, number: int) -> str:
        """Returns the id under which a failure of supervision is shown; "" if it is not known (yet)."""
        with self._lock:
            self._fold()
            key = self._cluster.failure_key(str(number))
            return key if key in self._cluster.document["failures"] else ""

    def failure(self, key: str) -> FailureFields | None:
        """Returns a copy of a failure's current record; None if there is none with that id."""
        if self.collector is not None:
            self.collector.refresh()
        with self._lock:
            self._fold()
            record = self._cluster.document["failures"].get(key)
            return None if record is None else _copy(record)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with a snapshot at once, and with deltas from then on; call the result to end that.

        Snapshots hold the state itself: encode them before the listener returns. All listeners get the same delta and
        must not change it. A listener must not block or call back. A listener that raises is not called again.
        """
        if self.collector is not None:
            self.collector.refresh()
        with self._lock:
            self._flush()
            if not self._notify(listener, self._snapshot()):
                return lambda: None
            first = not self._watchers
            self._watchers.append(listener)
            if first and not self._closed and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-store", daemon=True)
                self._thread.start()
                self._wake.set()  # events since the snapshot have woken no thread
        if first and self.collector is not None:
            self.collector.watch(on=True)
        return lambda: self._leave(listener)

    def resend(self, listener: Listener) -> None:
        """Sends a watcher a new snapshot."""
        with self._lock:
            self._flush()
            self._notify(listener, self._snapshot())

    def close(self) -> None:
        """Ends the store; watchers receive nothing more."""
        self._closed = True
        with self._lock:
            self._watchers.clear()
        self._wake.set()
        if self.collector is not None:
            self.collector.close()

    def _leave(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._watchers:
                return
            self._watchers.remove(listener)
            if self._watchers:
                return
        self._wake.set()
        self._on_unwatched()

    def _on_unwatched(self) -> None:
        if self.collector is not None:
            self.collector.watch(on=False)
        self.put(WatchersLeft(round(time.time(), 3)))

    # -- deltas -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                if not self._watchers or self._closed:
                    self._thread = None
                    return
                self._flush()
                deserted = not self._watchers
            if deserted:
                self._on_unwatched()
            time.sleep(max(FULL_S if self._sent >= FULL else SEND_S, self._sent / RECORDS_PER_S))

    def _fold(self) -> None:
        events = self._events
        while events:
            event = events.popleft()
            try:
                self._cluster.fold(event)
            except Exception:
                logger.exception("%r could not be folded in", event)
        if not self._watchers:
            self._cluster.take()  # the next watcher begins with a snapshot

    def _flush(self) -> None:
        self._fold()
        patch = self._cluster.take()
        self._sent = sum(len(ranks or ()) for ranks in patch.get("ranks", {}).values())
        if not patch:
            return
        self.seq += 1
        delta = {"type": "delta", "prev": self.seq - 1, "seq": self.seq, "patch": patch, "now": round(time.time(), 3)}
        for listener in tuple(self._watchers):
            if not self._notify(listener, delta):
                self._watchers.remove(listener)

    def _snapshot(self) -> Message:
        return {"type": "snapshot", "seq": self.seq, "state": self._cluster.document, "now": round(time.time(), 3)}

    @staticmethod
    def _notify(listener: Listener, message: Message) -> bool:
        try:
            listener(message)
        except Exception:
            logger.debug("a view is gone", exc_info=True)
            return False
        return True


def _copy(value: J) -> J:
    """Returns a copy of JSON, of the same shape."""
    copied: object = value
    if isinstance(value, dict):
        copied = {key: _copy(inner) for key, inner in value.items()}
    elif isinstance(value, list):
        copied = list(value)
    return cast(J, copied)


_stores: "weakref.WeakKeyDictionary[Runtime, Store]" = weakref.WeakKeyDictionary()
_stores_lock = threading.Lock()


def known_store(runtime: Runtime) -> Store | None:
    """Returns the store of a runtime, if this process has one."""
    return _stores.get(runtime)


def store_of(runtime: Runtime) -> Store:
    """Returns the store of a runtime; it is created, and listens, from the first call on."""
    with _stores_lock:
        store = _stores.get(runtime)
        if store is None:
            store = _stores[runtime] = Store(runtime)
        return store


def describe(mesh: MeshState | Handle[MeshState]) -> MeshView:
    """Returns the current view of a proc or actor mesh, or of a slice. Never blocks and sends nothing.

    The view is the store's if this process has one that contains the mesh. Otherwise, as in scripts and workers, the
    same reducer computes it from the facts about this one mesh.
    """
    state: MeshState = mesh if isinstance(mesh, MeshState) else state_of(mesh)
    region = state.region if isinstance(mesh, MeshState) else region_of(mesh)
    runtime = current_runtime()
    store = known_store(runtime)
    view = None if store is None else store.mesh_view(state.uid, region)
    if view is None:
        cluster = ClusterState()
        for fact in facts_of(runtime, state):
            cluster.fold(fact)
        for event in Pending(runtime).changes():
            cluster.fold(event)
        view = cluster.mesh_view(state.uid, region, now())
    assert view is not None
    return view
