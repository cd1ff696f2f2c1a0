"""The runtime: one per process. It connects the parts that deliver messages to actors and ports, and send them."""

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from monarch_nb.runtime import unretrieved, waiting
from monarch_nb.runtime.actors.cell import HOOK, ActorCell
from monarch_nb.runtime.actors.failures import FailureStore
from monarch_nb.runtime.actors.hosting import Hosting, LogPositions, PortTable, ProcessTables
from monarch_nb.runtime.actors.interrupts import Cancellation, CancelledCalls, Interrupts
from monarch_nb.runtime.arrivals import SPAWN, Arrivals, Losses
from monarch_nb.runtime.calls import CallLimits, PendingCall
from monarch_nb.runtime.context import (
    ROOT,
    Context,
    Instance,
    current,
    make_current,
    running_actor,
    running_call,
    started,
)
from monarch_nb.runtime.features import COLLECTIVES, DEBUG, Features, Supervising
from monarch_nb.runtime.meshes import ActorState
from monarch_nb.runtime.output.own_log import OwnLog, prefix_records
from monarch_nb.runtime.recorder import CallRecorder
from monarch_nb.runtime.sender import MessageSender
from monarch_nb.runtime.verbs import CANCEL, DOING, END, INTERRUPT, PROBE
from monarch_nb.runtime.waits import DeadlockDetector
from monarch_nb.transport import Clock, Parcel, Transport
from monarch_nb.wire import ActorError, Handlers, InFrame, decode, in_memory
from monarch_nb.wire.header import SKIP

T = TypeVar("T")


class Parts:
    """The parts of a process by type, added by the composition root."""

    def __init__(self) -> None:
        self._by_kind: dict[type, object] = {}

    def add(self, kind: type[T], part: T) -> T:
        """Adds a part. Raises ValueError for a second one of its kind."""
        if kind in self._by_kind:
            raise ValueError(f"this process has a {kind.__name__} already")
        self._by_kind[kind] = part
        return part

    def get(self, kind: type[T]) -> T:
        """Returns the part of a kind. Raises LookupError if there is none."""
        try:
            return cast(T, self._by_kind[kind])
        except KeyError:
            raise LookupError(
                f"this process has no {kind.__name__}: that is for the notebook or script that controls the mesh"
            ) from None


Loader = Callable[["Runtime"], object]  # attaches a feature
_ENGINES = frozenset({SKIP, HOOK, SPAWN})  # methods of messages that the engine itself sends


class Runtime:
    """All parts of a process of a cluster.

    `features` are loaded when they are first needed; `this_proc` and `proc_mesh` return this process, and the mesh it
    belongs to, for users, `proc_meshes` those that it has spawned; `run_in_actor` runs cells on actors.
    """

    def __init__(
        self,
        local: ProcessTables,
        node: Transport,
        supervisor: Supervising,
        clock: Clock,
        *,
        agent: str | None,
        features: Mapping[str, Loader],
        parts: Parts,
        this_proc: Callable[[], Any],
        proc_mesh: Callable[[], Any],
        proc_meshes: Callable[[], Sequence[Any]],
        run_in_actor: Callable[..., object],
        root_id: str = "<root>",
        is_worker: bool = False,
    ) -> None:
        self.address, self.host, self.agent = local.address, local.host, agent
        self.local, self.node, self.supervisor, self.clock = local, node, supervisor, clock
        self.local_hosts = {self.host}  # hosts whose processes this one reaches without their agent
        self.is_worker = is_worker  # started by a host agent, to hold actors
        self.run_in_actor, self.this_proc, self.proc_mesh = run_in_actor, this_proc, proc_mesh
        self.proc_meshes = proc_meshes
        self.calls, self.cells, self.meshes = local.calls, local.cells, local.meshes
        self.ports = PortTable()
        self.log = OwnLog(running_call)
        self.log_positions = LogPositions()  # of other processes; taken when their output has been shown
        self.root = Instance(self, local.root, (msgspec.structs.replace(ROOT, shown=root_id),))
        self.root_context = Context(self.root)
        self.cancelled = CancelledCalls()
        self._call_numbers = itertools.count()
        self.recorder: CallRecorder | None = None  # while a timeline is recorded
        self._pid = os.getpid()
        self._setup = threading.Event()
        self._setup.set()

        self.features = Features({name: partial(load, self) for name, load in features.items()})
        self.feature = self.features.get
        self.part, self.add_part = parts.get, parts.add
        self.on_call: list[Callable[[ActorState], None]] = []  # called for each call that begins here, on its thread
        self.failures = FailureStore(clock.later, lambda error: self.feature(DEBUG).freeze(error))
        losses = Losses(local, node, clock, self.ports, supervisor)
        sender = MessageSender(local, node, self.log, supervisor, losses.lost, unanswered=_ENGINES)
        self.verbs = Handlers("processes", sender.answer)
        hosting = Hosting(local, clock, self)
        arrivals = Arrivals(
            local, node, self.ports, self.verbs, features=self.features, hosting=hosting, losses=losses, sender=sender
        )
        # The parts' own methods: a call passes through no more of this class than its look-up.
        self.send, self.reply, self.refuse, self.check_size = (
            sender.send,
            sender.reply,
            sender.refuse,
            sender.check_size,
        )
        self.post, self.is_local, self.attach_inner_host = sender.post, sender.is_local, sender.attach_inner_host
        self.handle, self.undelivered, self.host_lost = arrivals.take, losses.lost, losses.host_lost
        self.host_actor, self.actor_ended, self.watch_gap = hosting.host_actor, hosting.ended, hosting.watch_gap
        self.stop_actors, self.on_actor_end, self.later = hosting.stop_all, hosting.on_end, clock.later
        self.latest_actors = hosting.latest

        self.waits = DeadlockDetector(self)
        cancellation = Cancellation(self)
        self.cancel_on_ranks, self.limit_call = cancellation.send, CallLimits(clock).add
        interrupts = Interrupts(
            local.cells, self.cancelled, clock, lambda cell: self.feature(COLLECTIVES).interrupted(cell)
        )
        self.verbs.handle(CANCEL, cancellation.arrive)
        self.verbs.handle(PROBE, self.waits.arrive)
        self.verbs.handle(END, self.waits.end)
        self.verbs.handle(INTERRUPT, interrupts.interrupt)
        self.verbs.handle(DOING, interrupts.doing)

    @property
    def closed(self) -> bool:
        """True once it has left the cluster."""
        return self.local.closed

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from its own, which goes on using it."""
        return self._pid != os.getpid()

    def start(self) -> None:
        """Starts to take messages."""
        self.node.start()

    def context(self) -> Context:
        """Returns the current context; the root client's outside actors."""
        return current.get() or self.root_context

    @staticmethod
    def new_uid(letter: str) -> str:
        """Returns a short id that no other mesh has."""
        return letter + secrets.token_hex(5)

    def new_call(self) -> str:
        """Returns a process-wide unique id for one call."""
        return f"{self.address}:{next(self._call_numbers)}"

    def held_at(self, mesh: str, rank: int) -> str:
        """Returns where the debugger has stopped an actor, which takes no messages; "" if it has not."""
        debugger = self.features.loaded(DEBUG)
        return debugger.held_at(mesh, rank) if debugger is not None else ""

    def reproduce(self, error: ActorError, **options: Any) -> Any:
        """Runs a failed call again here, under the debugger."""
        return self.feature(DEBUG).reproduce(error, **options)

    def release(self, call: PendingCall[object], done: Callable[[], None]) -> None:
        """Frees ranks that wait for others that have raised in a call, and calls `done`."""
        self.feature(COLLECTIVES).release(call, done)

    def wanted_breakpoints(self) -> bytes:
        """Returns the breakpoints for actors spawned from this process; mostly none."""
        debugger = self.features.loaded(DEBUG)
        return debugger.wanted() if debugger is not None else b""

    def arm(self, cell: ActorCell, cls: type) -> None:
        """Sets breakpoints in an actor about to be constructed, on its thread, so that they hold in `__init__`."""
        debugger = self.feature(DEBUG) if cell.spec.debug else self.features.loaded(DEBUG)
        if debugger is not None:
            debugger.arm(cell, cls)

    def failure(self, frames: Sequence[InFrame], call: PendingCall[object] | None = None) -> BaseException:
        """Returns the error for an encoded cause of a failure; `call` raises it."""
        return self.supervisor.error(in_memory(frames[0]), call)

    def decode_spawn(self, parcel: Parcel) -> tuple[type, tuple[object, ...], dict[str, object]]:
        """Returns the class and the arguments a SPAWN message carries."""
        cls, arguments = decode(parcel.frames[1:], self)
        args, kwargs = arguments.load(self) if hasattr(arguments, "load") else arguments
        return cls, args, kwargs

    def begin_setup(self) -> None:
        """Blocks the construction of actors until the set-up of the process is done."""
        self._setup.clear()

    def end_setup(self) -> None:
        """Ends the set-up, successful or not."""
        self._setup.set()

    def await_setup(self) -> None:
        """Blocks the construction of an actor until the set-up is done."""
        if threading.current_thread() is not threading.main_thread():
            self._setup.wait()

    def close(self, linger: float = 0.5) -> None:
        """Leaves the cluster: nothing is sent or received any more, and calls that wait fail."""
        if self.local.closed:
            return
        self.local.closed = self.verbs.closed = True
        before, unretrieved.leaving = unretrieved.leaving, True
        for call in tuple(self.calls.values()):
            call.fail(RuntimeError(f"{call.title}() was under way when this process left the cluster"))
        unretrieved.close()
        unretrieved.leaving = before
        self.features.close()
        self.clock.close()
        self.node.close(linger)


def install(new: Runtime | None, *, several: bool = False) -> None:
    """Makes `new` the process's runtime; None after the old one was closed.

    With `several`, other runtimes are simulated here, too: code in an actor gets its own.
    """
    former = started()
    if former is not None:
        waiting.observers.change(())
        if former.is_inherited:
            current.set(None)  # the actor whose code has forked is not here
    make_current(new, several=several)
    if new is not None:
        prefix_records(running_actor)
        waiting.join(new.waits)
