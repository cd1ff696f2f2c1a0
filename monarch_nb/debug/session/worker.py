"""What debugging needs in a process that holds actors: its debuggers, and the verbs by which they are reached."""

import itertools
import logging
import os
import re
import sys
import threading
import time
import types
from typing import Any

import msgspec

from monarch_nb.debug import records as r
from monarch_nb.debug.session import stack as stacks
from monarch_nb.debug.session.thread import Debugger
from monarch_nb.runtime import ActorCell, Runtime, current
from monarch_nb.runtime.failures import Kept, frames_of
from monarch_nb.settings import settings
from monarch_nb.wire import Header, Status, error_line, text_of

logger = logging.getLogger(__name__)
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)")


class Worker:
    """One per process. Debuggers are made when they are first needed, one for each thread that stops."""

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        self.heard = time.monotonic()  # the last word of a controller
        self.freezing = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_thread: dict[int, Debugger] = {}
        self._sessions: dict[str, Debugger] = {}
        self._said: set[str] = set()
        engine.controls.update(
            {
                "debug.command": self._command,
                "debug.break": self._break,
                "debug.autopsy": self._autopsy,
                "debug.stacks": self._stacks,
                "debug.lease": self._lease,
                "debug.freeze": self._freeze,
            }
        )

    # -- stopping, on the thread that stops ---------------------------------------------------------------------------

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread at `frame` until a controller lets it go on."""
        context = current.get()
        name = threading.current_thread().name
        if context is None and name.startswith("monarch-"):
            if name not in self._said:
                self._said.add(name)
                logger.warning("%s on the engine's own thread %s is passed by: it would stop the process", reason, name)
            return
        self.heard = time.monotonic()
        self._debugger().stop(frame, reason)

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread where an exception was raised."""
        tbs = frames_of(error)
        if tbs:
            self.heard = time.monotonic()
            self._debugger().autopsy(error, tbs[0], _line(error))

    def _debugger(self) -> Debugger:
        thread = threading.current_thread()
        ident = threading.get_ident()
        context = current.get()
        cell: ActorCell | None = context.actor_instance.cell if context is not None else None
        with self._lock:
            found = self._by_thread.get(ident)
            if found is not None and found.thread is not thread:  # its number was given to another one
                found = None
            if found is None:
                found = self._new(cell, thread)
                self._by_thread[ident] = found
        found.who = self._who(found.who.session, found.who.number, cell, thread)
        return found

    def _new(self, cell: "ActorCell | None", thread: threading.Thread) -> Debugger:
        session = f"{self.engine.address}#{next(self._numbers)}"
        found = Debugger(self, self._who(session, 0, cell, thread), ends=lambda: _ends(cell))
        found.thread = thread
        found.cell = cell
        self._sessions[session] = found
        if cell is not None:
            cell.on_end(lambda: self._forget(found))
        return found

    def _who(self, session: str, number: int, cell: "ActorCell | None", thread: threading.Thread) -> r.Stopped:
        engine = self.engine
        context = current.get() or engine.root_context
        if cell is None:
            uid, _, rest = engine.address.partition("/")[2].partition(".")
            rank, _, life = rest.partition(".")
            console = engine.cells.get((uid, int(rank or 0)))
            point = console.instance.rank if console is not None else context.message_rank
            name = console.spec.name if console is not None else "this process"
            about = {"mesh": uid, "rank": int(rank or 0), "incarnation": int(life or 0), "thread": thread.name}
        else:
            point, name = cell.instance.rank, cell.spec.name
            about = {"mesh": cell.mesh, "rank": cell.rank, "incarnation": cell.incarnation}
        running = cell.running if cell is not None else None
        return r.Stopped(
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

    def _forget(self, debugger: Debugger) -> None:
        with self._lock:
            self._sessions.pop(debugger.who.session, None)
            for ident, one in tuple(self._by_thread.items()):
                if one is debugger:
                    del self._by_thread[ident]

    # -- what debuggers tell and ask ----------------------------------------------------------------------------------

    def told_stopped(self, debugger: Debugger) -> None:
        """A thread has stopped."""
        with self._lock:
            self._sessions[debugger.who.session] = debugger
        self.tell("debug.stopped", debugger.who)

    def told_resumed(self, debugger: Debugger, why: str) -> None:
        """It goes on."""
        debugger.holder = ""
        self.tell("debug.resumed", r.Over(debugger.who.session, why))

    def over(self, debugger: Debugger, why: str) -> None:
        """Its endpoint has ended: no step of it will stop any more."""
        self.tell("debug.over", r.Over(debugger.who.session, why))

    def tell(self, verb: str, body: Any) -> None:
        """Tells the controller of all this: the process that nobody has started."""
        try:
            self.engine.control(self.home, verb, body)
        except Exception:  # it is gone: the lease decides
            logger.debug("%s could not be told", verb, exc_info=True)

    @property
    def home(self) -> str:
        """The process that has started this one; this one itself where nobody has."""
        uid, _, rest = self.engine.address.partition("/")[2].partition(".")
        mesh = self.engine.keeper._mesh
        if mesh is not None:
            return str(mesh._state.home)
        console = self.engine.cells.get((uid, int(rest.partition(".")[0] or 0))) if self.engine.is_worker else None
        return console.spec.owner_process if console is not None else self.engine.address

    def verdict(self, debugger: Debugger) -> str:
        """What is to become of a stopped thread when nothing is heard of its controller: "", "resume" or "end"."""
        if time.monotonic() - self.heard < settings.debug_lease:
            return ""
        return "end" if settings.debug_orphan == "end" else "resume"

    def arm(self, debugger: Debugger) -> None:
        """There are breakpoints: the actor's endpoints are run under the debugger's eyes."""
        if debugger.cell is not None:
            debugger.cell.watch = debugger.watched

    # -- verbs (reading thread) ---------------------------------------------------------------------------------------

    def _command(self, header: Header, parcel: Any) -> None:
        self.heard = time.monotonic()
        command = msgspec.msgpack.decode(parcel.frames[0], type=r.Command)
        debugger = self._sessions.get(command.session)
        if debugger is None or not debugger.stopped:
            self._answer(
                header, r.Answer(session=command.session, error="the rank is not stopped any more", resumed=True)
            )
            return
        if debugger.holder not in ("", header.src) and not command.force:
            told = (
                f"another controller ({debugger.holder}) is debugging this rank: call monarch.debug.detach() there, "
                "or monarch.debug.take() here"
            )
            self._answer(header, r.Answer(session=command.session, error=told, current=debugger.curindex))
            return
        debugger.holder = "" if command.kind == "release" else header.src
        if command.kind == "release":
            self._answer(header, r.Answer(session=command.session, current=debugger.curindex))
            return
        debugger.post(command, lambda answer: self._answer(header, answer))

    def _answer(self, header: Header, body: Any) -> None:
        self.engine.answer(header, Status.VALUE, body)

    def _lease(self, header: Header, parcel: Any) -> None:
        self.heard = time.monotonic()

    def _freeze(self, header: Header, parcel: Any) -> None:
        on = msgspec.msgpack.decode(parcel.frames[0], type=r.Freeze).on
        settings.configure({"debug_freeze_on_error": on})
        self._answer(header, r.Told("frozen at errors" if on else "not frozen at errors"))

    def _break(self, header: Header, parcel: Any) -> None:
        wish = msgspec.msgpack.decode(parcel.frames[0], type=r.Break)
        cell = self.engine.cells.get((wish.mesh, wish.rank))
        if cell is None or cell.obj is None:
            self._answer(header, r.Told(error="this process has no such actor, or its __init__ still runs"))
            return
        thread = cell.executor.thread
        ident = thread.ident or 0
        with self._lock:
            debugger = self._by_thread.get(ident)
            if debugger is None or debugger.thread is not thread:
                debugger = self._by_thread[ident] = self._new(cell, thread)
        if wish.clear:
            gone = debugger.numbers.pop(wish.number, [])
            for one in gone:
                debugger.forget_break(one)
            if not debugger.breaks:
                cell.watch = None
            self._answer(header, r.Told(f"{len(gone)} cleared"))
            return
        try:
            found = self._resolve(cell, wish.where)
        except LookupError as error:
            self._answer(header, r.Told(error=text_of(error.args[0])))
            return
        file, line, function = found
        wrong = debugger.set_break(file, line, wish.temporary, wish.condition or None, function)
        if wrong:
            self._answer(header, r.Told(error=wrong))
            return
        debugger.numbers.setdefault(wish.number, []).append(debugger.newest)
        self._answer(header, r.Told(f"{file}:{line}"))

    def _resolve(self, cell: ActorCell, where: str) -> tuple[str, int, str | None]:
        """File, line and (for functions) name. Raises LookupError."""
        found = _PLACE.fullmatch(where)
        if found is not None:
            return _file(found["file"], cell), int(found["line"]), None
        target: Any = None
        names = where.split(".")
        scopes: list[Any] = [
            type(cell.obj),
            *(sys.modules.get(c.__module__) for c in type(cell.obj).__mro__[:-1]),
            sys.modules,
        ]
        for method in vars(type(cell.obj)).values():
            inner = getattr(method, "_method", method)
            if hasattr(inner, "__globals__"):
                scopes.insert(1, inner.__globals__)
                break
        if names[0] == type(cell.obj).__name__:
            scopes.insert(0, {names[0]: type(cell.obj)})
        for scope in scopes:
            target = _dig(scope, names)
            if target is not None:
                break
        target = getattr(target, "_method", target)
        while hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        code = getattr(target, "__code__", None)
        if code is None:
            raise LookupError(
                f"{where} is neither file:line nor a function that {type(cell.obj).__name__} or its module has"
            )
        return code.co_filename, code.co_firstlineno, code.co_name

    def _autopsy(self, header: Header, parcel: Any) -> None:
        wish = msgspec.msgpack.decode(parcel.frames[0], type=r.Autopsy)
        failures = self.engine.failures
        if wish.release:
            self._answer(header, r.Told(f"{failures.release(wish.mesh or None, wish.rank)} released"))
            return
        kept = [one for one in failures.of(wish.mesh, wish.rank) if not wish.call or one.call == wish.call]
        if not kept:
            reason = (
                "no frames of this rank are kept: it has not failed, it failed longer ago than debug_keep_failures "
                "calls, its frames held more than debug_keep_bytes, or it ran out of memory"
            )
            self._answer(header, r.Told(error=reason))
            return
        self.heard = time.monotonic()
        session = f"{self.engine.address}#{next(self._numbers)}"
        threading.Thread(
            target=self._open, args=(kept[0], session, wish), name=f"autopsy of {kept[0].endpoint}", daemon=True
        ).start()
        self._answer(header, r.Told(session=session))

    def _open(self, kept: Kept, session: str, wish: r.Autopsy) -> None:
        from monarch_nb.runtime import Context

        token = current.set(Context(kept.instance, kept.point, kept.call, kept.chain))
        cell = kept.instance.cell
        try:
            who = self._who(session, 0, cell, threading.current_thread())
            who = msgspec.structs.replace(who, endpoint=kept.endpoint, call="", chain=())
            debugger = Debugger(self, who, ends=lambda: self.engine.closed)
            debugger.thread = threading.current_thread()
            tbs = frames_of(kept.error)
            if tbs:
                debugger.autopsy(kept.error, tbs[0], f"post-mortem: {_line(kept.error)}")
            self._forget(debugger)
        except KeyboardInterrupt:
            pass
        finally:
            current.reset(token)

    def _stacks(self, header: Header, parcel: Any) -> None:
        every = sys._current_frames()
        cells = {cell.executor.thread.ident: cell for cell in tuple(self.engine.cells.values())}
        found = []
        for thread in threading.enumerate():
            frame = every.get(thread.ident or 0)
            cell = cells.get(thread.ident)
            if frame is None or (cell is None and thread.name.startswith("monarch-")):
                continue
            stack = stacks.walk(frame)
            own = stacks.own_part(stack)
            running = cell.running if cell is not None else None
            if cell is not None and running is None and not own:
                stack = []  # it waits for messages
            found.append(
                r.Thread(
                    thread.name,
                    stacks.frames(_without_wait(stack[own:])),
                    cell.spec.name if cell is not None else "",
                    cell.mesh if cell is not None else "",
                    cell.rank if cell is not None else 0,
                    running[1] if running is not None else "",
                    time.monotonic() - running[2] if running is not None else 0.0,
                )
            )
        self._answer(header, r.Threads(tuple(found)))


def _without_wait(stack: list[stacks.Entry]) -> list[stacks.Entry]:
    """Without the engine's frames at its inner end: how `.get()` waits is of no interest."""
    end = len(stack)
    while end and stacks.is_engine(stack[end - 1][0]):
        end -= 1
    return stack[:end]


def _ends(cell: "ActorCell | None") -> bool:
    return cell is not None and cell.cause is not None


def _line(error: BaseException) -> str:
    return next(iter(error_line(error).splitlines()))


def _dig(scope: Any, names: list[str]) -> Any:
    at = scope
    for name in names:
        at = at.get(name) if isinstance(at, dict) else getattr(at, "__dict__", {}).get(name, getattr(at, name, None))
        if at is None:
            return None
    return at


def _file(name: str, cell: ActorCell) -> str:
    """The file that people mean by a short name: one that code of this process came from."""
    import linecache

    if os.path.isabs(name) or name.startswith("<"):
        return name
    known = {getattr(module, "__file__", None) or "" for module in tuple(sys.modules.values())}
    own = getattr(sys.modules.get(type(cell.obj).__module__), "__file__", None)
    ending = os.sep + name.replace("/", os.sep)
    found = sorted(file for file in {*known, *linecache.cache, own or ""} if file == name or file.endswith(ending))
    if own in found:
        return str(own)
    if not found:
        raise LookupError(
            f"no code in this process comes from a file {name}: check the name, or write more of its path"
        )
    if len(found) > 1:
        raise LookupError(f"{name} may be {', '.join(found[:4])}: write more of its path")
    return found[0]
