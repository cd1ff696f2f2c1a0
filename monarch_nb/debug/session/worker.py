"""The debuggers of a process that holds actors, and the verbs by which a controller reaches them."""

import itertools
import logging
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.debug.records import Over, Stopped
from monarch_nb.debug.session.places import file_of, resolve
from monarch_nb.debug.session.thread import NOT_STOPPED, ThreadDebugger
from monarch_nb.debug.session.threads import threads
from monarch_nb.runtime import ActorCell, Context, Runtime, current
from monarch_nb.runtime.failures import Kept, frames_of
from monarch_nb.settings import settings
from monarch_nb.wire import Asker, Done, Verb, error_line, text_of

logger = logging.getLogger(__name__)
Q = TypeVar("Q", bound=msgspec.Struct)


class Worker:
    """One per process. Debuggers are made when they are first needed, one for each thread that stops."""

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        self.heard = time.monotonic()  # the last word of a controller
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_thread: dict[int, ThreadDebugger] = {}
        self._sessions: dict[str, ThreadDebugger] = {}
        self._warned: set[str] = set()  # threads of the engine that were to stop
        for command in verbs.COMMANDS.values():
            engine.verbs.handle(command, self._command)
        engine.verbs.handle(verbs.BREAK, self._break)
        engine.verbs.handle(verbs.BREAK_FILE, self._break_file)
        engine.verbs.handle(verbs.BREAK_RAISED, self._break_raised)
        engine.verbs.handle(verbs.AUTOPSY, self._autopsy)
        engine.verbs.handle(verbs.STACKS, self._stacks)
        engine.verbs.handle(verbs.LEASE, self._lease)
        engine.verbs.handle(verbs.FREEZE, self._freeze)

    # -- stopping, on the thread that stops ---------------------------------------------------------------------------

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread at `frame` until a controller lets it go on."""
        name = threading.current_thread().name
        if current.get() is None and name.startswith("monarch-"):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s on the engine's own thread %s is passed by: it would stop the process", reason, name)
            return
        self.heard = time.monotonic()
        self._debugger().stop(frame, reason)

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread where an exception was raised."""
        tbs = frames_of(error)
        if tbs:
            self.heard = time.monotonic()
            self._debugger().autopsy(tbs[0], _line(error))

    def _debugger(self) -> ThreadDebugger:
        """That of the calling thread."""
        context = current.get()
        cell: ActorCell | None = context.actor_instance.cell if context is not None else None
        debugger = self._of(threading.current_thread(), cell)
        debugger.who = self._who(debugger.who.session, debugger.who.number, cell, debugger.thread)
        return debugger

    def _of(self, thread: threading.Thread, cell: ActorCell | None) -> ThreadDebugger:
        ident = thread.ident or 0
        with self._lock:
            debugger = self._by_thread.get(ident)
            if debugger is None or debugger.thread is not thread:  # its number was given to another one
                debugger = self._by_thread[ident] = self._new(cell, thread)
        return debugger

    def _new(self, cell: ActorCell | None, thread: threading.Thread) -> ThreadDebugger:
        session = f"{self.engine.address}#{next(self._numbers)}"

        def armed() -> None:  # the actor's endpoints are run under the debugger's eyes, if anything can stop them
            if cell is not None:
                cell.watch = None if debugger.machine.quiet else debugger.watched

        debugger = ThreadDebugger(
            self, self._who(session, 0, cell, thread), thread, ends=lambda: _ends(cell), armed=armed
        )
        self._sessions[session] = debugger
        if cell is not None:
            cell.on_end(lambda: self._forget(debugger))
        return debugger

    def _who(self, session: str, number: int, cell: ActorCell | None, thread: threading.Thread) -> Stopped:
        engine = self.engine
        context = current.get() or engine.root_context
        if cell is None:
            uid, _, rest = engine.address.partition("/")[2].partition(".")
            rank, _, incarnation = rest.partition(".")
            console = engine.cells.get((uid, int(rank or 0)))
            point = console.instance.rank if console is not None else context.message_rank
            name = console.spec.name if console is not None else "this process"
            about = {
                "mesh": uid,
                "rank": int(rank or 0),
                "incarnation": int(incarnation or 0),
                "thread": thread.name,
            }
        else:
            point, name = cell.instance.rank, cell.spec.name
            about = {"mesh": cell.mesh, "rank": cell.rank, "incarnation": cell.incarnation}
        running = cell.running if cell is not None else None
        return Stopped(
            session=session,
            number=number,
            address=engine.address,
            host=engine.host,
            pid=os.getpid(),
            name=name,
            labels=tuple(point.extent.labels),
            point=tuple(point.values()),
            sizes=tuple(point.extent.sizes),
            endpoint=running[1] if running is not None else ("__init__" if cell is not None else ""),
            call=context.call,
            chain=context.chain,
            **about,  # type: ignore[arg-type]
        )

    def _forget(self, debugger: ThreadDebugger) -> None:
        with self._lock:
            self._sessions.pop(debugger.who.session, None)
            for ident, known in tuple(self._by_thread.items()):
                if known is debugger:
                    del self._by_thread[ident]

    # -- what debuggers tell and ask (Process of a ThreadDebugger) -----------------------------------------------------

    def stopped(self, debugger: ThreadDebugger) -> None:
        """A thread has stopped."""
        with self._lock:
            self._sessions[debugger.who.session] = debugger
        self._tell(verbs.STOPPED, debugger.who)

    def resumed(self, debugger: ThreadDebugger, why: str) -> None:
        """It goes on."""
        debugger.holder = ""
        self._tell(verbs.RESUMED, Over(debugger.who.session, why))

    def over(self, debugger: ThreadDebugger, why: str) -> None:
        """Its endpoint has ended: no step of it will stop any more."""
        self._tell(verbs.OVER, Over(debugger.who.session, why))

    def _tell(self, verb: Verb[Q, None], message: Q) -> None:
        """Tells the controller of all this: the process that nobody has started."""
        try:
            self.engine.tell(self.home, verb, message)
        except Exception:  # it is gone: the lease decides
            logger.debug("%s could not be told", verb.name, exc_info=True)

    @property
    def home(self) -> str:
        """The process that has started this one; this one itself where nobody has."""
        uid, _, rest = self.engine.address.partition("/")[2].partition(".")
        mesh = self.engine.keeper._mesh
        if mesh is not None:
            return str(mesh._state.home)
        console = self.engine.cells.get((uid, int(rest.partition(".")[0] or 0))) if self.engine.is_worker else None
        return console.spec.owner_process if console is not None else self.engine.address

    def verdict(self) -> str:
        """What is to become of stopped threads when nothing is heard of a controller: "", "resume" or "end"."""
        if time.monotonic() - self.heard < settings.debug_lease:
            return ""
        return "end" if settings.debug_orphan == "end" else "resume"

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs a function later, on the clock's thread."""
        self.engine.later(seconds, function)

    # -- commands for stopped threads (reading thread) -----------------------------------------------------------------

    def _command(self, command: m.Command, asker: Asker[m.Answer]) -> m.Answer | None:
        self.heard = time.monotonic()
        debugger = self._sessions.get(command.session)
        if debugger is None or not debugger.stopped:
            return m.Answer(session=command.session, error=NOT_STOPPED, resumed=True)
        if debugger.holder not in ("", asker.src) and not command.force:
            wrong = (
                f"another controller ({debugger.holder}) is debugging this rank: call monarch.debug.detach() there, "
                "or monarch.debug.take() here"
            )
            return m.Answer(session=command.session, error=wrong, current=debugger.who.current)
        if isinstance(command, m.Release):
            debugger.holder = ""
            return m.Answer(session=command.session, current=debugger.who.current)
        debugger.holder = asker.src
        if not debugger.post(command, asker.reply):
            return m.Answer(session=command.session, error=NOT_STOPPED, resumed=True)
        return None

    def _lease(self, _: m.Lease, asker: Asker[None]) -> None:
        self.heard = time.monotonic()

    # -- breakpoints from outside --------------------------------------------------------------------------------------

    def _debugger_of(self, mesh: str, rank: int) -> tuple[ThreadDebugger, Any]:
        """That of an actor's thread, and the actor. Raises LookupError."""
        cell = self.engine.cells.get((mesh, rank))
        if cell is None or cell.obj is None:
            raise LookupError("this process has no such actor, or its __init__ still runs")
        return self._of(cell.executor.thread, cell), cell.obj

    def _break(self, wanted: m.Break, asker: Asker[m.Told]) -> m.Told:
        set_by = f"{asker.src} {wanted.number}"
        try:
            debugger, obj = self._debugger_of(wanted.mesh, wanted.rank)
            if wanted.clear:
                return m.Told(f"{debugger.clear_breakpoints(set_by)} cleared")
            file, line, function = resolve(wanted.where, obj)
            added = debugger.add_breakpoint(
                file,
                line,
                function=function,
                condition=wanted.condition,
                hit_condition=wanted.hit_condition,
                log=wanted.log,
                temporary=wanted.temporary,
                set_by=set_by,
            )
        except (LookupError, ValueError) as error:
            return m.Told(error=text_of(error.args[0]))
        return m.Told(f"{added.file}:{added.line}")

    def _break_file(self, wanted: m.BreakFile, asker: Asker[m.PlacedAll]) -> m.PlacedAll:
        set_by = f"{asker.src} {wanted.file}"
        try:
            debugger, obj = self._debugger_of(wanted.mesh, wanted.rank)
            file = file_of(wanted.file, obj)
        except LookupError as error:
            return m.PlacedAll(error=text_of(error.args[0]))
        debugger.clear_breakpoints(set_by)
        return m.PlacedAll(tuple(_placed(debugger, file, each, set_by) for each in wanted.lines))

    def _break_raised(self, wanted: m.BreakRaised, asker: Asker[m.Told]) -> m.Told:
        try:
            debugger, _ = self._debugger_of(wanted.mesh, wanted.rank)
        except LookupError as error:
            return m.Told(error=text_of(error.args[0]))
        debugger.stop_where_raised(wanted.on)
        return m.Told("stops where exceptions are raised" if wanted.on else "does not stop there")

    def _freeze(self, wanted: m.Freeze, asker: Asker[m.Told]) -> m.Told:
        settings.configure({"debug_freeze_on_error": wanted.on})
        return m.Told("frozen at errors" if wanted.on else "not frozen at errors")

    # -- failures that are kept, and where everything is ---------------------------------------------------------------

    def _autopsy(self, wanted: m.Autopsy, asker: Asker[m.Told]) -> m.Told:
        failures = self.engine.failures
        if wanted.release:
            return m.Told(f"{failures.release(wanted.mesh or None, wanted.rank)} released")
        kept = [each for each in failures.of(wanted.mesh, wanted.rank) if not wanted.call or each.call == wanted.call]
        if not kept:
            reason = (
                "no frames of this rank are kept: it has not failed, it failed longer ago than debug_keep_failures "
                "calls, its frames held more than debug_keep_bytes, or it ran out of memory"
            )
            return m.Told(error=reason)
        self.heard = time.monotonic()
        session = f"{self.engine.address}#{next(self._numbers)}"
        threading.Thread(
            target=self._open, args=(kept[0], session), name=f"autopsy of {kept[0].endpoint}", daemon=True
        ).start()
        return m.Told(session=session)

    def _open(self, kept: Kept, session: str) -> None:
        token = current.set(Context(kept.instance, kept.point, kept.call, kept.chain))
        thread = threading.current_thread()
        try:
            who = self._who(session, 0, kept.instance.cell, thread)
            who = msgspec.structs.replace(who, endpoint=kept.endpoint, call="", chain=())
            debugger = ThreadDebugger(self, who, thread, ends=lambda: self.engine.closed)
            tbs = frames_of(kept.error)
            if tbs:
                debugger.autopsy(tbs[0], f"post-mortem: {_line(kept.error)}")
            self._forget(debugger)
        except KeyboardInterrupt:
            pass
        finally:
            current.reset(token)

    def _stacks(self, _: Done, asker: Asker[m.Threads]) -> m.Threads:
        return m.Threads(threads(tuple(self.engine.cells.values())))


def _placed(debugger: ThreadDebugger, file: str, wanted: m.BreakLine, set_by: str) -> m.Placed:
    try:
        added = debugger.add_breakpoint(
            file,
            wanted.line,
            condition=wanted.condition,
            hit_condition=wanted.hit_condition,
            log=wanted.log,
            set_by=set_by,
        )
    except ValueError as error:
        return m.Placed(error=text_of(error))
    return m.Placed(added.number)


def _ends(cell: ActorCell | None) -> bool:
    return cell is not None and cell.cause is not None


def _line(error: BaseException) -> str:
    return next(iter(error_line(error).splitlines()))
