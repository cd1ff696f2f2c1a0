"""The debuggers of a process that holds actors, one for each thread that stops."""

import itertools
import linecache
import logging
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from monarch_nb.debug import verbs
from monarch_nb.debug.records import DebugError, Over, Stopped
from monarch_nb.debug.render.groups import pick
from monarch_nb.debug.session.thread import CELL, ThreadDebugger
from monarch_nb.debug.verbs import BreakLine, BreakSet
from monarch_nb.mesh.mesh_events import Event, MeshEvents, OwnerChanged
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ActorCell, Context, Instance, Runtime, current
from monarch_nb.runtime.actors.failures import StoredFailure, frames_of
from monarch_nb.settings import settings
from monarch_nb.wire import Verb, error_line, msgpack_decoder, parse_address

logger = logging.getLogger(__name__)
Q = TypeVar("Q", bound=msgspec.Struct)
_ENGINE = "monarch_nb."


class BreakpointSets:
    """Breakpoints by the address of the controller that set them. Actors without any are not slowed down. Actors
    of the library run functions of users, too: cells on processes, and functions on parts of tensors.
    """

    def __init__(self, runtime: Runtime, debugger_of: Callable[[ActorCell], ThreadDebugger]) -> None:
        self._runtime = runtime
        self._debugger_of = debugger_of
        self._sets: dict[str, BreakSet] = {}
        self._classes: weakref.WeakKeyDictionary[ActorCell, type] = weakref.WeakKeyDictionary()  # actors in __init__
        self._armed: weakref.WeakSet[ActorCell] = weakref.WeakSet()
        self._lock = threading.Lock()

    def encoded(self) -> bytes:
        """Breakpoints for the spec of an actor that this process spawns; empty where there are none."""
        sets = {src: breaks for src, breaks in self._sets.items() if _has_any(breaks)}
        return msgspec.msgpack.encode(sets) if sets else b""

    def take(self, src: str, breaks: BreakSet) -> int:
        """Replaces a controller's breakpoints; returns the number of actors that have any."""
        with self._lock:
            current = self._sets.get(src)
            if current is None or current.version < breaks.version:
                self._sets[src] = breaks
            cells = tuple(self._runtime.cells.values())
            for cell in cells:
                cls = type(cell.obj) if cell.obj is not None else self._classes.get(cell)
                if cls is not None:
                    self._apply(cell, cls)
            return sum(cell in self._armed for cell in cells)

    def drop(self, keep: str = "") -> None:
        """Removes the breakpoints of all controllers except `keep`: these could not resume the ranks that they stop."""
        for src, breaks in tuple(self._sets.items()):
            if src != keep and _has_any(breaks):
                self.take(src, BreakSet(version=breaks.version + 1))

    def prepare(self, cell: ActorCell, cls: type) -> None:
        """Arms the breakpoints of an actor before its `__init__`, on its thread."""
        sets: dict[str, BreakSet] = msgpack_decoder(dict[str, BreakSet]).decode(cell.spec.debug or b"\x80")
        with self._lock:
            for src, breaks in sets.items():
                before = self._sets.get(src)
                if before is None or before.version < breaks.version:
                    self._sets[src] = breaks
            self._classes[cell] = cls
            self._apply(cell, cls)

    def _apply(self, cell: ActorCell, cls: type) -> None:
        names = {base.__qualname__ for base in cls.__mro__}
        engines = cls.__module__.startswith(_ENGINE)
        actor = _actor_record(cell)
        lines: dict[str, tuple[BreakLine, ...]] = {}
        raised = uncaught = False
        for src, breaks in self._sets.items():
            lines[src] = tuple(
                msgspec.structs.replace(line, file=_local_file(line.file))
                for line in breaks.lines
                if (not line.actor or line.actor in names) and _matches(actor, line.ranks)
            )
            raised = raised or (breaks.raised is not None and _matches(actor, breaks.raised))
            uncaught = uncaught or (not engines and breaks.uncaught is not None and _matches(actor, breaks.uncaught))
        self._runtime.failures.freeze_at(cell.mesh, cell.rank, on=uncaught)
        if raised or any(lines.values()) or cell in self._armed:
            debugger = self._debugger_of(cell)
            for src, src_lines in lines.items():
                debugger.set_breakpoints(src, src_lines)
            debugger.stop_where_raised(raised)
        (self._armed.add if raised or uncaught or any(lines.values()) else self._armed.discard)(cell)


def _local_file(file: str) -> str:
    """Returns the name of a file in this process: an earlier kernel may have run the same cell."""
    if file in linecache.cache or not CELL.search(file):
        return file
    _, separator, name = file.rpartition(os.sep)
    same = (path for path in tuple(linecache.cache) if path.endswith(separator + name) and CELL.search(path))
    return next(same, file)


def _has_any(breaks: BreakSet) -> bool:
    return bool(breaks.lines) or breaks.raised is not None or breaks.uncaught is not None


def _actor_record(cell: ActorCell) -> Stopped:
    """Returns an actor as a record that rank selections can be matched with."""
    point = cell.instance.rank
    return Stopped(
        session="",
        number=0,
        address="",
        host="",
        pid=0,
        mesh=cell.mesh,
        name=cell.spec.name,
        rank=cell.rank,
        incarnation=cell.incarnation,
        labels=tuple(point.extent.labels),
        point=tuple(point.values()),
        sizes=tuple(point.extent.sizes),
    )


def _matches(actor: Stopped, ranks: str) -> bool:
    try:
        return not ranks.strip() or bool(pick([actor], ranks))
    except DebugError:
        return False


class Debuggers:
    """The debuggers of one process, created when first needed; by session and by thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._controller_seen = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_thread: dict[int, ThreadDebugger] = {}
        self._by_session: dict[str, ThreadDebugger] = {}
        self._warned: set[str] = set()  # the library's threads on which a breakpoint was skipped
        self.sets = BreakpointSets(runtime, lambda cell: self._of(cell.executor.thread, cell))
        runtime.part(MeshEvents).listeners.append(self._on_mesh_event)

    def _on_mesh_event(self, event: Event) -> None:
        """Sends a new owner all stopped threads; breakpoints of the owner before are removed."""
        if isinstance(event, OwnerChanged):
            self.sets.drop(keep=event.owner)
        if isinstance(event, OwnerChanged) and event.owner:
            self.renew_lease()
            with self._lock:
                waiting = [debugger for debugger in self._by_session.values() if debugger.stopped]
            for debugger in waiting:
                debugger.holder = ""
                self._send(verbs.STOPPED, debugger.record)

    def renew_lease(self) -> None:
        """Records that a controller has sent something."""
        self._controller_seen = time.monotonic()

    # -- stopping, on the thread that stops ---------------------------------------------------------------------------

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread at `frame` until a controller resumes it."""
        name = threading.current_thread().name
        if current.get() is None and name.startswith("monarch-"):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s on the engine's own thread %s is skipped: it would stop the process", reason, name)
            return
        self.renew_lease()
        self._of_this_thread().stop(frame, reason)

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread where an exception was raised."""
        tbs = frames_of(error)
        if tbs:
            self.renew_lease()
            self._of_this_thread().autopsy(tbs[0], _first_line(error))

    def pause(self, actors: Sequence[tuple[str, int]] = ()) -> tuple[int, int]:
        """Stops running actors (all, or those named) at their next traced line; returns how many will stop, and how
        many are running.
        """
        running = [cell for cell in tuple(self._runtime.cells.values()) if cell.running is not None]
        paused = [cell for cell in running if not actors or (cell.mesh, cell.rank) in actors]
        return sum(self._of(cell.executor.thread, cell).pause() for cell in paused), len(paused)

    def take(self, src: str, breaks: BreakSet) -> int:
        """Sets a controller's breakpoints; returns the number of actors that have any."""
        armed = self.sets.take(src, breaks)
        if breaks.release:
            self.release()
        return armed

    def release(self) -> None:
        """Resumes everything, except opened frames of failures."""
        with self._lock:
            debuggers = tuple(self._by_session.values())
        for debugger in debuggers:
            debugger.release()

    def open(self, failure: StoredFailure) -> str:
        """Opens the frames of a stored failure on a thread of its own; returns the session."""
        self.renew_lease()
        session = self._new_session()
        name = f"monarch-autopsy of {failure.endpoint}"
        threading.Thread(target=self._show, args=(failure, session), name=name, daemon=True).start()
        return session

    def _show(self, failure: StoredFailure, session: str) -> None:
        token = current.set(Context(failure.instance, failure.point, failure.call, failure.chain))
        thread = threading.current_thread()
        try:
            record = _identity(self._runtime, _cell_of(failure.instance), thread, session, 0)
            record = msgspec.structs.replace(record, endpoint=failure.endpoint, call="", chain=())
            debugger = ThreadDebugger(self, record, thread, ends=lambda: self._runtime.closed)
            tbs = frames_of(failure.error)
            if tbs:
                debugger.autopsy(tbs[0], f"post-mortem: {_first_line(failure.error)}")
            self._forget(debugger)
        except KeyboardInterrupt:
            pass
        finally:
            current.reset(token)

    # -- queries ------------------------------------------------------------------------------------------------------

    def of_session(self, session: str) -> ThreadDebugger | None:
        """Returns the debugger of a session."""
        return self._by_session.get(session)

    def of_actor(self, mesh: str, rank: int) -> tuple[ThreadDebugger, object]:
        """Returns the debugger of an actor's thread, and the actor. Raises LookupError."""
        cell = self._runtime.cells.get((mesh, rank))
        if cell is None or cell.obj is None:
            raise LookupError("this process has no such actor, or its __init__ still runs")
        return self._of(cell.executor.thread, cell), cell.obj

    def _of_this_thread(self) -> ThreadDebugger:
        context = current.get()
        cell = _cell_of(context.actor_instance) if context is not None else None
        debugger = self._of(threading.current_thread(), cell)
        before = debugger.record
        debugger.record = _identity(self._runtime, cell, debugger.thread, before.session, before.number)
        return debugger

    def _of(self, thread: threading.Thread, cell: ActorCell | None) -> ThreadDebugger:
        ident = thread.ident or 0
        with self._lock:
            debugger = self._by_thread.get(ident)
            if debugger is None or debugger.thread is not thread:  # the ident was reused
                debugger = self._by_thread[ident] = self._new(cell, thread)
        return debugger

    def _new_session(self) -> str:
        return f"{self._runtime.address}#{next(self._numbers)}"

    def _new(self, cell: ActorCell | None, thread: threading.Thread) -> ThreadDebugger:
        def armed() -> None:  # endpoints run under the debugger only if something can stop them
            if cell is not None:
                cell.watch = None if debugger.machine.quiet else debugger.watched

        record = _identity(self._runtime, cell, thread, self._new_session(), 0)
        debugger = ThreadDebugger(self, record, thread, ends=lambda: _ends(cell), armed=armed)
        self._by_session[record.session] = debugger
        if cell is not None:
            cell.on_end(lambda: self._forget(debugger))
        return debugger

    def _forget(self, debugger: ThreadDebugger) -> None:
        with self._lock:
            self._by_session.pop(debugger.record.session, None)
            for ident, registered in tuple(self._by_thread.items()):
                if registered is debugger:
                    del self._by_thread[ident]

    # -- messages of debuggers (Process of a ThreadDebugger) ----------------------------------------------------------

    def stopped(self, debugger: ThreadDebugger) -> None:
        """Reports that a thread has stopped."""
        with self._lock:
            self._by_session[debugger.record.session] = debugger
        self._send(verbs.STOPPED, debugger.record)

    def resumed(self, debugger: ThreadDebugger, reason: str) -> None:
        """Reports that a thread has resumed."""
        debugger.holder = ""
        self._send(verbs.RESUMED, Over(debugger.record.session, reason))

    def over(self, debugger: ThreadDebugger, reason: str) -> None:
        """Reports that the endpoint of a thread has ended: its step will not stop any more."""
        self._send(verbs.OVER, Over(debugger.record.session, reason))

    def _send(self, verb: Verb[Q, None], message: Q) -> None:
        """Sends a message to the controller, or to the process on the way to it."""
        try:
            self._runtime.post(_home_of(self._runtime), verb, message)
        except Exception:  # the controller has ended: the lease decides
            logger.debug("%s could not be sent", verb.name, exc_info=True)

    def verdict(self) -> str:
        """Returns the fate of stopped threads without controller: "" during the lease, then "resume" or "end"."""
        if self._runtime.part(MeshRegistry).is_left:
            self.renew_lease()  # the lease of the mesh counts, until a controller attaches
        if time.monotonic() - self._controller_seen < settings.debug_lease:
            return ""
        self.sets.drop()
        return "end" if settings.debug_orphan == "end" else "resume"

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs a function later, on the clock's thread."""
        self._runtime.later(seconds, function)


def _ends(cell: ActorCell | None) -> bool:
    return cell is not None and cell.cause is not None


def _first_line(error: BaseException) -> str:
    return next(iter(error_line(error).splitlines()))


def _cell_of(instance: Instance) -> ActorCell | None:
    return instance.cell if isinstance(instance.cell, ActorCell) else None


def _identity(runtime: Runtime, cell: ActorCell | None, thread: threading.Thread, session: str, number: int) -> Stopped:
    """Returns a thread before it has stopped; `cell` is the actor that it runs, if any."""
    context = current.get() or runtime.root_context
    if cell is None:
        uid, rank, incarnation = parse_address(runtime.address).place
        console = runtime.cells.get((uid, rank))
        point = console.instance.rank if console is not None else context.message_rank
        name = console.spec.name if console is not None else "this process"
        thread_name = thread.name
    else:
        point, name = cell.instance.rank, cell.spec.name
        uid, rank, incarnation = cell.mesh, cell.rank, cell.incarnation
        is_unnamed = thread is threading.main_thread() or thread.name.startswith("monarch-")
        thread_name = "" if is_unnamed else thread.name  # such as that of a stream of tensors
    running = cell.running if cell is not None else None
    return Stopped(
        session=session,
        number=number,
        address=runtime.address,
        host=runtime.host,
        pid=os.getpid(),
        mesh=uid,
        name=name,
        rank=rank,
        incarnation=incarnation,
        labels=tuple(point.extent.labels),
        point=tuple(point.values()),
        sizes=tuple(point.extent.sizes),
        endpoint=running[1] if running is not None else ("__init__" if cell is not None else ""),
        call=context.call,
        chain=context.chain,
        thread=thread_name,
    )


def _home_of(runtime: Runtime) -> str:
    """Returns the process that has started this one, or this process if it is the root."""
    home = runtime.part(MeshRegistry).started_by
    if home:
        return home
    uid, rank, _ = parse_address(runtime.address).place
    console = runtime.cells.get((uid, rank)) if runtime.is_worker else None
    return console.spec.owner_process if console is not None else runtime.address
