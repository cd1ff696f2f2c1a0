"""The runtime: one per process; takes messages from the transport to actors and ports, and sends theirs."""

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.routing import Branch, below, indices
from monarch_nb.runtime import features, forgotten, log_prefix
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.cancels import Cancels
from monarch_nb.runtime.cell import HOOK, ActorCell
from monarch_nb.runtime.clock import Clock
from monarch_nb.runtime.context import ROOT, Context, Instance, current, running_actor, running_call
from monarch_nb.runtime.failures import Failures
from monarch_nb.runtime.future import _wait_guards
from monarch_nb.runtime.interruptions import Interruptions
from monarch_nb.runtime.life import ActorLife, SpawnActor
from monarch_nb.runtime.log_positions import LogPositions
from monarch_nb.runtime.own_log import OwnLog
from monarch_nb.runtime.parking import Parking
from monarch_nb.runtime.ports import UNRETURNED, PortTable
from monarch_nb.runtime.supervising import Supervising
from monarch_nb.runtime.waits import Waits
from monarch_nb.settings import settings
from monarch_nb.transport import DescriptorLimitError, Parcel, TransportError, UnreachableError, held_back, lost_here
from monarch_nb.wire import Header, Kind, Status, check_size, decode, encode_exception
from monarch_nb.wire.header import SKIP, TOLD_ELSEWHERE, CastPlan

if TYPE_CHECKING:
    from monarch_nb.transport import Node

logger = logging.getLogger(__name__)

FILL_AGAIN_S = 0.5  # between attempts to say which messages will not come, while there is no descriptor for that
SPAWN = "__spawn__"
_ANSWERS = frozenset({"reply", "proc.pong"})  # CONTROL messages to a port of the other side
_ENGINES = frozenset({SKIP, HOOK, SPAWN})  # methods of messages that the engine itself sends
_NOTHING = Parcel()

_spawn_decoder = msgspec.msgpack.Decoder(SpawnActor)


class Runtime:
    """Everything a process needs to take part. `handle` runs on the reading thread and runs no user code."""

    def __init__(self, address: str, agent: str | None, *, root_id: str = "<root>") -> None:
        self.address = address
        self.host = address.partition("/")[0]
        self.agent = agent
        self.local_hosts = {self.host}  # whose processes this one reaches without their agent
        self.node: Node = None  # type: ignore[assignment]  # set by `start`
        self.supervisor: Supervising = None  # type: ignore[assignment]  # set by the layer above
        self.keeper: Any = None  # set by the mesh layer: the meshes this process owns and knows
        self.ports = PortTable()
        self.calls: dict[str, PendingCall] = {}
        self.cells: dict[tuple[str, int], ActorCell] = {}
        self.controls: dict[str, Callable[[Header, Parcel], None]] = {}
        self.clock = Clock()
        self.meshes: dict[str, Any] = {}  # what is known here of meshes, by uid; kept by the mesh layer
        self.root = Instance(self, f"{address}#", (msgspec.structs.replace(ROOT, shown=root_id),))
        self.root_context = Context(self.root)
        self.run_in_actor: Callable[..., Any] = _no_cells  # set by the mesh layer
        self.inline: Any = None  # a host inside this process, for tests; set by the mesh layer
        self.on_stranger: Callable[[str], None] = lambda address: None  # set by the mesh layer
        self.closed = False
        self.is_worker = False  # started by a host agent, to hold actors
        self.features: dict[str, Any] = {}  # what the layers above have attached, by name
        self.failures = Failures(self.clock.later)
        self._parking = Parking(self.clock.later)
        self.waits = Waits(self)
        self.cancels = Cancels(self)
        self.interruptions = Interruptions(self)
        self._lock = threading.Lock()
        self._call_numbers = itertools.count()
        self._setup = threading.Event()
        self._setup.set()
        self.log = OwnLog(running_call)
        self.log_positions = LogPositions()  # of other processes; taken by who has shown their output
        self._gaps: set[ActorCell] = set()

    def start(self, node: "Node") -> None:
        """Takes messages from now on."""
        self.node = node
        node.on_stranger = lambda address: self.on_stranger(address)
        node.start()

    # -- sending ----------------------------------------------------------------------------------------------------

    def context(self) -> Context:
        """The current context; the root client's outside actors."""
        return current.get() or self.root_context

    @staticmethod
    def new_uid(letter: str) -> str:
        """A short id that no other mesh has."""
        return letter + secrets.token_hex(5)

    def new_call(self) -> str:
        """A process-wide unique id for one call."""
        return f"{self.address}:{next(self._call_numbers)}"

    def send(self, header: Header, parcel: Parcel, lane: int = 0) -> None:
        """Sends from any thread; blocks, interruptibly, only while the receiver's credits are used up.

        Where nobody can be reached any more, whoever waits for the answer is told, as of a death a moment later.
        """
        try:
            if self.inline is not None and header.dst.startswith(self.inline.host):
                self.inline.take(header, parcel)
            else:
                self.node.send(header, parcel, lane=lane)
        except UnreachableError as error:
            if header.kind in (Kind.CONTROL, Kind.REPLY):
                raise
            self.undelivered(header, str(error))

    def bound(self, dst: str, frames: Sequence[Any]) -> None:
        """Raises MessageTooLargeError for a body that is too large to leave this process for an address.

        Only what leaves it becomes a frame: between actors of one process there is no bound.
        """
        if not self.stays(dst):
            check_size(frames)

    def stays(self, dst: str) -> bool:
        """Whether a message to an address stays in this process."""
        return dst == self.address or (self.inline is not None and dst.startswith(self.inline.host))

    def control(self, dst: str, verb: str, body: Any = None, *, port: int = 0, lane: int = 1, call: str = "") -> None:
        """Sends an engine message, urgent unless said otherwise."""
        header = Header(Kind.CONTROL, dst, self.address, method=verb, port=port, call=call)
        self._tell(header, self.node.snapshot([msgspec.msgpack.encode(body)]), lane)

    def answer(self, request: Header, status: Status, body: Any) -> None:
        """Answers a CONTROL message, if somebody waits for the answer."""
        if request.port:
            header = Header(Kind.CONTROL, request.src, self.address, method="reply", port=request.port, status=status)
            self._tell(header, self.node.snapshot([msgspec.msgpack.encode(body)]), 1)

    def _tell(self, header: Header, parcel: Parcel, lane: int) -> None:
        try:
            self.send(header, parcel, lane)
        except UnreachableError:
            raise
        except TransportError:
            if not self.closed:
                raise
            raise UnreachableError(f"{header.dst} cannot be reached: this process has left the cluster") from None

    def reply(self, request: Header, status: Status, frames: Sequence[Any]) -> None:
        """Answers a CALL, if somebody waits for the answer."""
        if request.port == 0:
            return
        header = Header(
            Kind.REPLY,
            request.src,
            self.address,
            port=request.port,
            index=request.index,
            status=status,
            call=request.call,
            log=self.log.position(),
        )
        try:
            self.send(header, self.node.snapshot(frames))
        except Exception as error:
            if self.closed or isinstance(error, UnreachableError):
                return  # nobody is there to hear it
            if not isinstance(error, TransportError):
                logger.exception("an answer to %s could not be sent", request.src)
            told = type(error)(f"the `result` of {request.method} could not be sent by {self.address}: {error}")
            header.status = Status.EXCEPTION
            self.send(header, self.node.snapshot(encode_exception(told)))

    def refuse(self, request: Header, cause: Any) -> None:
        """Tells the sender of a CALL that nobody will ever run it."""
        if request.port:
            self.reply(request, Status.FAILURE, [self.supervisor.encode(cause, request)])
        elif request.method not in _ENGINES:
            self._return(request, self.supervisor.reason(cause))

    def _return(self, header: Header, reason: str) -> None:
        """Sends back a message that nobody waits for an answer to."""
        if not self.closed:
            self.node.undeliverable(header, _NOTHING, reason)

    # -- receiving (reading thread) ---------------------------------------------------------------------------------

    def handle(self, header: Header, parcel: Parcel) -> None:
        """Takes one message to where it belongs."""
        kind = header.kind
        if kind == Kind.CALL:
            cell = self.cells.get((header.mesh, header.rank))
            if cell is not None and cell.incarnation == header.incarnation:
                cell.arrive(header, parcel)
            elif header.method == SPAWN:
                self._spawn(header, parcel)
            else:
                self._no_such_actor(header, parcel)
        elif kind in (Kind.REPLY, Kind.FOLDED, Kind.PORT):
            handler = self.ports.get(header.port)
            if handler is not None:
                handler.arrive(header, parcel)
                return
            if kind == Kind.PORT:
                self._return(header, "nothing receives from that port any more")
            self.node.consumed(parcel)
        elif kind == Kind.CONTROL:
            control = self.controls.get(header.method)
            if control is None and features.load_for(self, header, parcel):
                return
            if control is not None:
                try:
                    control(header, parcel)
                except Exception:
                    if not self.closed:  # else it came too late, and cannot be answered
                        logger.exception("control message %s from %s", header.method, header.src)
            self.node.consumed(parcel)
        elif kind == Kind.RETURNED:
            self._returned(header, parcel)

    def _spawn(self, header: Header, parcel: Parcel) -> None:
        spec = _spawn_decoder.decode(parcel.frames[0])
        key = (header.mesh, header.rank)
        old = self.cells.get(key)
        cell = ActorCell(self, spec, header, parcel)

        def arrive() -> None:
            self.cells[key] = cell

        parked = self._parking.unpark(key, arrive)
        if old is not None and old.cause is None:
            old.stop("replaced by a newer incarnation")
        self.keeper.hosts(spec)
        cell.executor.start()
        for message in parked:
            self.handle(*message)

    def _no_such_actor(self, header: Header, parcel: Parcel) -> None:
        place = (header.mesh, header.rank)
        cause = self._parking.end_of(*place, header.incarnation)
        now = self.cells.get(place)
        if cause is None and (now is None or now.incarnation < header.incarnation):
            if not self._parking.park((header, parcel), lambda: self.cells.get(place) is not now, self._never_came):
                self.handle(header, parcel)
            return
        self.node.consumed(parcel)
        self.refuse(header, cause or self.supervisor.lost_cause(header, "the actor has been replaced by a newer one"))

    def _never_came(self, message: "tuple[Header, Parcel]") -> None:
        header, parcel = message
        self.node.consumed(parcel)
        told = (
            f"no such actor was spawned in {self.address} within {settings.message_delivery_timeout:g} s "
            "(message_delivery_timeout); where its spawn takes longer, wait for .initialized before the call"
        )
        self.refuse(header, self.supervisor.lost_cause(header, told))

    def _returned(self, header: Header, parcel: Parcel) -> None:
        reason = msgspec.msgpack.decode(parcel.frames[0], type=list[str])[0] if parcel.frames else "it was returned"
        self.node.consumed(parcel)
        self.undelivered(header, reason)

    def undelivered(self, header: Header, reason: str) -> None:
        """A message of ours has come back, or its link failed: whoever waits for its answer is told."""
        kind = header.status if header.kind == Kind.RETURNED else header.kind
        if kind == Kind.CALL and header.seq >= 0:
            if header.method != SKIP:
                self._fill_gap(header)
            elif isinstance(lost_here(reason), DescriptorLimitError):
                self.later(FILL_AGAIN_S, lambda: self._fill_gap(header))
        if kind == Kind.CAST and header.plan is not None and header.method != SKIP:
            self._fill_gaps(header, header.plan)
        if kind in (Kind.REPLY, Kind.FOLDED) or header.method in _ANSWERS:
            return  # whoever wanted it is gone; its port number is none of ours
        handler = self.ports.get(header.port) if header.port and kind != Kind.PORT else None
        if isinstance(handler, PendingCall):
            if not (header.kind == Kind.RETURNED and header.flags & TOLD_ELSEWHERE):
                places = [header.index] if header.plan is None else indices(header.plan.runs)
                error: BaseException = lost_here(reason)
                answered = header.kind == Kind.RETURNED and header.src == self.address  # but the answer found no room
                elsewhere = header.kind == Kind.RETURNED and not answered
                if elsewhere or not (answered or isinstance(error, DescriptorLimitError)):
                    error = self.supervisor.lost(header, reason, handler)
                handler.lose(places, error)
        elif handler is not None and kind == Kind.CONTROL:
            handler.lost(reason)  # type: ignore[attr-defined]  # a request
        elif kind == Kind.CONTROL:
            logger.debug("%s to %s: %s", header.method, header.dst, reason)
        elif kind == Kind.PORT:
            if not header.flags & UNRETURNED and not self.closed:
                self.supervisor.undeliverable(header, reason)
        elif header.port == 0 and header.method != SKIP and not self.closed:  # who waits for an answer has been told
            self.supervisor.undeliverable(header, reason)

    def _fill_gap(self, header: Header) -> None:
        """What comes after a lost message must not wait for it."""
        dst = header.src if header.kind == Kind.RETURNED else header.dst
        skip = Header(
            Kind.CALL,
            dst,
            self.address,
            header.mesh,
            header.rank,
            header.incarnation,
            header.sender,
            header.seq,
            SKIP,
        )
        if self.closed:
            return
        try:
            self.node.send(skip, Parcel([b""]), lane=0)
        except DescriptorLimitError:  # whoever is to skip it lives, and waits
            self.later(FILL_AGAIN_S, lambda: self._fill_gap(header))
        except TransportError:  # nobody is there to wait
            return

    def _fill_gaps(self, header: Header, plan: CastPlan) -> None:
        """The same for a cast, or a part of one: also past an agent that is gone."""
        head = Branch(f"{plan.layout.hosts[plan.hosts[0]]}/agent", plan)
        for agent, part in (head, *below(plan)):
            skip = Header(
                Kind.CAST,
                agent,
                self.address,
                header.mesh,
                sender=header.sender,
                method=SKIP,
                call=header.call,
                plan=part,
            )
            with contextlib.suppress(TransportError):
                self.node.send(skip, Parcel([b""]), lane=1)

    def host_lost(self, host: str, reason: str) -> None:
        """Calls that went by way of a lost host to others will not be answered from there."""
        for call in tuple(self.calls.values()):
            for plan in call.branches:
                if plan.layout.hosts[plan.hosts[0]] != host:
                    continue
                lost = [place for _, part in below(plan) for place in indices(part.runs)]
                told = f"it was sent through host {host}, which is lost: {reason}"
                sent = Header(Kind.CAST, f"{host}/agent", self.address, mesh=call.mesh, call=call.call, plan=plan)
                call.lose(lost, self.supervisor.lost(sent, told, call))

    # -- actors of this process -------------------------------------------------------------------------------------

    def decode_spawn(self, parcel: Parcel) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """The class and the arguments a SPAWN message carries."""
        cls, arguments = decode(parcel.frames[1:], self)
        args, kwargs = arguments.load(self) if hasattr(arguments, "load") else arguments
        return cls, args, kwargs

    def host_actor(self, spec: SpawnActor, mesh: str, rank: int, incarnation: int, obj: Any) -> ActorCell:
        """Hosts a ready-made object of the engine itself; its thread is started by the caller."""
        header = Header(Kind.CALL, self.address, self.address, mesh=mesh, rank=rank, incarnation=incarnation)
        cell = ActorCell(self, spec, header, None)
        cell.obj = obj
        self.cells[mesh, rank] = cell
        return cell

    def cell_ended(self, cell: ActorLife) -> None:
        """An actor is gone; what comes for it later is refused with its cause."""
        self._parking.ended(cell.mesh, cell.rank, cell.incarnation, cell.cause)
        with self._lock:
            if self.cells.get((cell.mesh, cell.rank)) is cell:
                del self.cells[cell.mesh, cell.rank]
        cell.refuse_queued()
        self.supervisor.cell_ended(cell)

    def begin_setup(self) -> None:
        """Actors are constructed only once the set-up of the process is done."""
        self._setup.clear()

    def end_setup(self) -> None:
        """The set-up is done, well or not."""
        self._setup.set()

    def await_setup(self) -> None:
        """Blocks an actor's first breath until the set-up is done."""
        if threading.current_thread() is not threading.main_thread():
            self._setup.wait()

    # the layers above answer these

    def this_proc(self) -> Any:
        """This process, as a ProcMesh of one."""
        return self.keeper.this_proc()

    def proc_mesh(self) -> Any:
        """The ProcMesh this process belongs to."""
        return self.keeper.proc_mesh()

    def cause_of(self, kind: str, error: BaseException, text: str, cell: ActorLife, method: str) -> Any:
        """The cause of an actor's failure."""
        return self.supervisor.cause_of(kind, error, text, cell, method)

    def stopped_cause(self, cell: ActorLife, reason: str) -> Any:
        """What callers of a stopped actor are told."""
        return self.supervisor.stopped_cause(cell, reason)

    def actor_failed(self, cell: ActorLife) -> None:
        """Tells the owner."""
        self.supervisor.actor_failed(cell)

    def stop_children(self, instance: Instance) -> None:
        """Stops what an ending actor owns."""
        self.supervisor.stop_children(instance)

    def supervision_error(self, frames: Sequence[Any], call: PendingCall) -> BaseException:
        """The error a call raises for an encoded cause."""
        return self.supervisor.error(frames[0], call)

    # -- waits ------------------------------------------------------------------------------------------------------

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs a short function later, on the clock's thread."""
        self.clock.later(seconds, function)

    def watch_gap(self, cell: ActorCell) -> None:
        """A message came before its predecessor: if that one never comes, say so instead of waiting for ever."""
        if cell in self._gaps:
            return
        self._gaps.add(cell)

        def look() -> bool:
            for gap in cell.expire_gaps(time.monotonic()):
                self.supervisor.undeliverable(
                    Header(Kind.CALL, self.address, self.address, mesh=cell.mesh, rank=cell.rank, sender=gap.sender),
                    f"message {gap.first} from {gap.sender} to {cell.instance} is lost",
                )
            if cell.inbox.waiting and cell.cause is None:
                return True
            self._gaps.discard(cell)
            return False

        self.clock.every(1.0, look)

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop_actors(self, reason: str, timeout: float) -> None:
        """Stops all actors of this process and waits for their clean-up; not from an actor's own thread."""
        cells = [cell for cell in tuple(self.cells.values()) if cell.spec.where != 1]
        for cell in cells:
            cell.stop(reason)
        begun = time.monotonic()
        for cell in cells:
            if cell.executor.thread.ident is not None:  # else it has not begun, and will not
                patience = min(timeout, cell.patience) if cell.obj is None else timeout
                cell.executor.thread.join(max(0.0, begun + patience - time.monotonic()))

    def close(self, linger: float = 0.5) -> None:
        """Leaves: nothing is sent or received any more. Calls still waiting fail."""
        if self.closed:
            return
        self.closed = True
        kept, forgotten.leaving = forgotten.leaving, True
        for call in tuple(self.calls.values()):
            call.fail(RuntimeError(f"{call.title}() was under way when this process left the cluster"))
        forgotten.close()
        forgotten.leaving = kept
        self.clock.close()
        self.node.close(linger)


def _no_cells(*_: Any) -> None:
    raise RuntimeError("this process cannot run cells")


_runtime: Runtime | None = None
_factory: Callable[[], Runtime] | None = None
_start_lock = threading.RLock()


def runtime() -> Runtime:
    """This process's runtime; in a process that is not part of a mesh yet, it becomes a controller now."""
    if _runtime is None:
        with _start_lock:
            if _runtime is None:
                if _factory is None:
                    raise RuntimeError("import monarch.actor first")
                held_back(lambda factory: install(factory()), _factory)
    assert _runtime is not None
    return _runtime


def started() -> Runtime | None:
    """This process's runtime, if it has one yet."""
    return _runtime


def install(new: Runtime | None) -> None:
    """Makes `new` the process's runtime; None after the old one was closed."""
    global _runtime
    if _runtime is not None:
        _wait_guards.clear()
    _runtime = new
    if new is not None:
        log_prefix.install(running_actor)
        _wait_guards.append(new.waits.guard)


def set_factory(factory: Callable[[], Runtime]) -> None:
    """How a process that belongs to no mesh becomes a controller."""
    global _factory
    _factory = factory
