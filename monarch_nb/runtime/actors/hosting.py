"""The tables of one process, and its actors: how they are spawned and ended, and messages for absent ones handled."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.meshes import MeshState
from monarch_nb.runtime.stored_answers import StoredAnswers
from monarch_nb.runtime.verbs import RunsOn, SpawnActor
from monarch_nb.settings import settings
from monarch_nb.transport import Clock, Parcel
from monarch_nb.wire import Header, Kind, host_of, msgpack_decoder, parse_address

if TYPE_CHECKING:
    from monarch_nb.runtime.cause import Cause
    from monarch_nb.runtime.process import Runtime

TO_THE_END = 1 << 62  # the position of a process that has ended: the end of its output
REMEMBERED = 10_000  # ends of actors whose causes late callers still get
_REPLACED = "the actor has been replaced by a newer one"

_making = threading.Lock()


class ByteCounts:
    """Bytes of messages and transfers that have left and reached this process. Threads count without a lock."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = self.sent = 0


class ProcessTables:
    """The tables that the parts of a runtime, supervision and meshes share."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = host_of(address)
        self.root = f"{address}#"  # the stream of code outside actors
        self.calls: dict[str, PendingCall[object]] = {}  # calls that wait for answers, by id
        self.cells: dict[tuple[str, int], ActorCell] = {}  # the actors here, by mesh and rank
        self.meshes: dict[str, MeshState] = {}  # owned here or referred to, by uid
        self.away: set[str] = set()  # processes that have detached from meshes which live here
        self.orphans: set[str] = set()  # calls of such a process before it left, if it has returned
        self._stored_answers: StoredAnswers | None = None
        self.traffic = ByteCounts()
        self.closed = False  # this process has left the cluster

    @property
    def stored_answers(self) -> "StoredAnswers":
        """Stored answers that a controller may not have read."""
        if self._stored_answers is None:
            with _making:
                self._stored_answers = self._stored_answers or StoredAnswers()
        return self._stored_answers


class PortHandler(Protocol):
    """The receiver behind a port number."""

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Handles a reply or a value, on the reading thread."""


class PortTable:
    """The open ports of a process by number."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer within `open` may open or close others
        self._next = 1
        self._open: dict[int, PortHandler] = {}
        self._by_process: dict[str, dict[int, PortHandler]] = {}  # handlers that one process is to answer

    def open(self, handler: PortHandler, of: str = "") -> int:
        """Assigns a number to `handler`; `of` is the one process that is to answer."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = handler
            if of:
                self._by_process.setdefault(of, {})[number] = handler
        return number

    def close(self, number: int, of: str = "") -> None:
        """Closes a port: later values for it are dropped; `of` as in `open`."""
        self._open.pop(number, None)
        if of:
            with self._lock:
                handlers = self._by_process.get(of, {})
                handlers.pop(number, None)
                if not handlers:
                    self._by_process.pop(of, None)

    def get(self, number: int) -> PortHandler | None:
        """Returns the handler behind a number."""
        return self._open.get(number)

    def of(self, process: str) -> list[PortHandler]:
        """Returns a snapshot of the handlers that one process is to answer."""
        with self._lock:
            return list(self._by_process.get(process, {}).values())

    def __len__(self) -> int:
        return len(self._open)


class LogPositions(dict[str, int]):
    """Output positions by address; each reply of a process that keeps its output sets one. Thread-safe."""

    def ended(self, address: str) -> None:
        """Handles the end of a process: its last output is awaited, too."""
        self[address] = TO_THE_END

    def take(self) -> dict[str, int]:
        """Removes and returns the positions since the last call."""
        positions: dict[str, int] = {}
        for _ in range(len(self)):
            try:
                address, position = self.popitem()
            except KeyError:  # another thread takes them as well
                break
            positions[address] = max(position, positions.get(address, 0))
        return positions

    def forget(self, uid: str) -> None:
        """Forgets the positions of the processes of a mesh."""
        for address in tuple(self):
            if parse_address(address).mesh == uid:
                self.pop(address, None)


Message = tuple[Header, Parcel]
ActorKey = tuple[str, int]  # actor mesh, rank

_spawn_decoder = msgpack_decoder(SpawnActor)


class EarlyMessages:
    """Stores early messages until their actor is spawned, and the causes with which late ones are refused."""

    def __init__(self, call_later: Callable[[float, Callable[[], object]], None]) -> None:
        self._call_later = call_later
        self._lock = threading.Lock()
        self._parked: dict[ActorKey, list[Message]] = {}
        self._ends: OrderedDict[tuple[str, int, int], Cause] = OrderedDict()

    def ended(self, mesh: str, rank: int, incarnation: int, cause: "Cause") -> None:
        """Records the cause of an actor's end."""
        with self._lock:
            self._ends[mesh, rank, incarnation] = cause
            while len(self._ends) > REMEMBERED:
                self._ends.popitem(last=False)

    def end_of(self, mesh: str, rank: int, incarnation: int) -> "Cause | None":
        """Returns the cause of an actor's end; None if it is unknown."""
        return self._ends.get((mesh, rank, incarnation))

    def ends_of(self, meshes: Collection[str]) -> list[tuple[str, int, int, "Cause"]]:
        """Returns mesh, rank, incarnation and cause of all known ends in these meshes, the oldest first."""
        with self._lock:
            return [(*key, cause) for key, cause in self._ends.items() if key[0] in meshes]

    def park(self, message: Message, is_hosted: Callable[[], bool], give_up: Callable[[Message], None]) -> bool:
        """Stores a message until its actor is spawned, for a limited time; False if it `is_hosted` by now."""
        key = (message[0].mesh, message[0].rank)
        with self._lock:
            if is_hosted():
                return False
            self._parked.setdefault(key, []).append(message)

        def expire() -> None:
            if self._take(key, message):
                give_up(message)

        # The actor's spawn may travel another way.
        self._call_later(settings.message_delivery_timeout, expire)
        return True

    def unpark(self, key: ActorKey, arrive: Callable[[], None]) -> list[Message]:
        """Registers an actor by `arrive`; returns the messages that waited for it, in order."""
        with self._lock:
            arrive()
            return self._parked.pop(key, [])

    def _take(self, key: ActorKey, message: Message) -> bool:
        with self._lock:
            parked = self._parked.get(key, [])
            for index, item in enumerate(parked):
                if item is message:
                    del parked[index]
                    if not parked:
                        del self._parked[key]
                    return True
        return False


class Hosting:
    """Holds the actors. On the reading thread, unless a method says otherwise."""

    def __init__(self, local: ProcessTables, clock: Clock, process: "Runtime") -> None:
        self._local, self._clock, self._process = local, clock, process
        self._parking = EarlyMessages(clock.later)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[ActorCell], object]] = []
        self._waiting: set[ActorCell] = set()  # for a message that precedes those that have arrived

    def spawn(self, header: Header, parcel: Parcel) -> Iterable[Message]:
        """Spawns an actor; returns the messages that have arrived before it."""
        spec = _spawn_decoder.decode(parcel.frames[0])
        key = (header.mesh, header.rank)
        old = self._local.cells.get(key)
        if old is not None and old.incarnation > header.incarnation:  # requested by a former owner
            self._process.node.consumed(parcel)
            self._process.refuse(header, self._process.supervisor.lost_cause(header, _REPLACED))
            return ()
        cell = ActorCell(self._process, spec, header, parcel)

        def arrive() -> None:
            self._local.cells[key] = cell

        parked = self._parking.unpark(key, arrive)
        if old is not None and old.cause is None:
            old.stop("replaced by a newer incarnation")
        self._process.supervisor.actor_spawned(cell)
        try:
            cell.executor.start()
        except RuntimeError as error:  # the system has no thread left
            self._process.node.consumed(parcel)
            advice = "stop other actors, or raise the limit (ulimit -u, pids of the container)"
            cell.fail("init", RuntimeError(f"no thread could be started for it: {error}; {advice}"), header)
            cell.cleanup.finish(None)
        return parked

    def host_actor(self, spec: SpawnActor, mesh: str, rank: int, incarnation: int, obj: object) -> ActorCell:
        """Hosts a ready-made object of the engine itself; its thread is started by the caller. Thread-safe."""
        address = self._local.address
        header = Header(Kind.CALL, address, address, mesh=mesh, rank=rank, incarnation=incarnation)
        cell = ActorCell(self._process, spec, header, None)
        cell.obj = obj
        self._local.cells[mesh, rank] = cell
        return cell

    def absent(self, header: Header, parcel: Parcel, retry: Callable[[Header, Parcel], None]) -> None:
        """Stores or refuses a message for an absent actor. `retry` takes it if the actor is here by then."""
        key = (header.mesh, header.rank)
        cause = self._parking.end_of(*key, header.incarnation)
        now = self._local.cells.get(key)
        if cause is None and (now is None or now.incarnation < header.incarnation):

            def has_come() -> bool:
                return self._local.cells.get(key) is not now

            if not self._parking.park((header, parcel), has_come, self._give_up):
                retry(header, parcel)
            return
        self._process.node.consumed(parcel)
        self._process.refuse(header, cause or self._process.supervisor.lost_cause(header, _REPLACED))

    def _give_up(self, message: Message) -> None:
        header, parcel = message
        self._process.node.consumed(parcel)
        reason = (
            f"no such actor was spawned in {self._local.address} within {settings.message_delivery_timeout:g} s "
            "(message_delivery_timeout); where its spawn takes longer, wait for .initialized before the call"
        )
        self._process.refuse(header, self._process.supervisor.lost_cause(header, reason))

    def watch_gap(self, cell: ActorCell) -> None:
        """Handles a message without its predecessor, which is reported as lost if it does not arrive in time."""
        if cell in self._waiting:
            return
        self._waiting.add(cell)
        address = self._local.address

        def look() -> bool:
            for gap in cell.expire_gaps(self._clock.monotonic()):
                self._process.supervisor.undeliverable(
                    Header(Kind.CALL, address, address, mesh=cell.mesh, rank=cell.rank, sender=gap.sender),
                    f"message {gap.first} from {gap.sender} to {cell.instance} is lost",
                )
            if cell.inbox.waiting and cell.cause is None:
                return True
            self._waiting.discard(cell)
            return False

        self._clock.every(1.0, look)

    def ended(self, cell: ActorCell) -> None:
        """Handles an actor's end; later messages to it are refused with its cause. Thread-safe."""
        if cell.cause is not None:
            self._parking.ended(cell.mesh, cell.rank, cell.incarnation, cell.cause)
        with self._lock:
            if self._local.cells.get((cell.mesh, cell.rank)) is cell:
                del self._local.cells[cell.mesh, cell.rank]
        cell.refuse_queued()
        if cell.state == "stopped":
            self._process.failures.release(cell.mesh, cell.rank)
        self._process.supervisor.actor_ended(cell)
        for listener in tuple(self._listeners):
            listener(cell)

    def latest(self, meshes: Collection[str]) -> dict[tuple[str, int], tuple[int, object]]:
        """Returns the latest incarnation here of each actor of these meshes, and the cause of its end. Thread-safe."""
        records: dict[tuple[str, int], tuple[int, object]] = {}
        for mesh, rank, incarnation, cause in self._parking.ends_of(meshes):
            if incarnation >= records.get((mesh, rank), (0, None))[0]:
                records[mesh, rank] = (incarnation, cause)
        for cell in tuple(self._local.cells.values()):
            if cell.mesh in meshes and cell.spec.runs_on is not RunsOn.MAIN_THREAD:
                records[cell.mesh, cell.rank] = (cell.incarnation, cell.cause)
        return records

    def on_end(self, listener: Callable[[ActorCell], object]) -> None:
        """Calls `listener` with each actor that ends from now on, on the thread that ended it."""
        self._listeners.append(listener)

    def stop_all(self, reason: str, timeout: float) -> None:
        """Stops all actors but that of the main thread and waits for their clean-up; not from an actor's own thread."""
        cells = [cell for cell in tuple(self._local.cells.values()) if cell.spec.runs_on is not RunsOn.MAIN_THREAD]
        for cell in cells:
            cell.stop(reason)
        start = self._clock.monotonic()
        for cell in cells:
            if cell.executor.thread.ident is not None:  # else it has not begun, and will not
                patience = min(timeout, cell.cleanup.patience) if cell.obj is None else timeout
                cell.executor.thread.join(max(0.0, start + patience - self._clock.monotonic()))


def calls_of(cell: ActorCell) -> list[str]:
    """Returns the calls that an actor runs, and those in its queue."""
    return [*(header.call for header, _ in cell.queued()), *cell.running_now()]
