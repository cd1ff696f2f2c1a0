"""Handlers of the debugger's verbs in a process, on the reading thread."""

import importlib
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from monarch_nb.debug import verbs
from monarch_nb.debug.records import ThreadRecord
from monarch_nb.debug.session import stack as stacks
from monarch_nb.debug.session.debuggers import Debuggers
from monarch_nb.debug.session.thread import NOT_STOPPED
from monarch_nb.mesh.console import Console
from monarch_nb.runtime import ActorCell, EndpointProperty, Runtime
from monarch_nb.runtime.actors.executors import ActorRun, frames_of, runs_of, suspended_frames
from monarch_nb.settings import settings
from monarch_nb.wire import Asker, Done, error_line, text_of

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)")


class DebugHandlers:
    """The handlers of one process."""

    def __init__(self, runtime: Runtime, debuggers: Debuggers) -> None:
        self._runtime = runtime
        self._debuggers = debuggers
        for command in verbs.COMMANDS.values():
            runtime.verbs.handle(command, self._command)
        runtime.verbs.handle(verbs.BREAK, self._break)
        runtime.verbs.handle(verbs.BREAK_SET, self._break_set)
        runtime.verbs.handle(verbs.PAUSE, self._pause)
        runtime.verbs.handle(verbs.AUTOPSY, self._autopsy)
        runtime.verbs.handle(verbs.STACKS, self._stacks)
        runtime.verbs.handle(verbs.LEASE, self._lease)
        runtime.verbs.handle(verbs.FREEZE, self._freeze)

    # -- commands for stopped threads ---------------------------------------------------------------------------------

    def _command(self, command: verbs.Command, asker: Asker[verbs.CommandAnswer]) -> verbs.CommandAnswer | None:
        self._debuggers.renew_lease()
        debugger = self._debuggers.of_session(command.session)
        if debugger is None or not debugger.stopped:
            return verbs.CommandAnswer(session=command.session, error=NOT_STOPPED, resumed=True)
        if debugger.holder not in ("", asker.src) and not command.force:
            wrong = (
                f"another controller ({debugger.holder}) is debugging this rank: call monarch.debug.detach() there, "
                "or monarch.debug.take() here"
            )
            return verbs.CommandAnswer(session=command.session, error=wrong, current=debugger.record.current)
        if isinstance(command, verbs.Release):
            debugger.holder = ""
            return verbs.CommandAnswer(session=command.session, current=debugger.record.current)
        debugger.holder = asker.src
        if not debugger.post(command, asker.reply):
            return verbs.CommandAnswer(session=command.session, error=NOT_STOPPED, resumed=True)
        return None

    def _lease(self, _: verbs.RenewLease, asker: Asker[None]) -> None:
        self._debuggers.renew_lease()

    # -- breakpoints from outside --------------------------------------------------------------------------------------

    def _break(self, message: verbs.Break, asker: Asker[verbs.CommandOutcome]) -> verbs.CommandOutcome | None:
        outcome = self._apply(message, asker.src, imports=False)
        if not outcome.error or "." not in message.where:
            return outcome
        # The module may have to be imported; the reading thread runs no user code.
        retry = threading.Thread(
            target=lambda: asker.reply(self._apply(message, asker.src, imports=True)), name="monarch-break", daemon=True
        )
        retry.start()
        return None

    def _apply(self, message: verbs.Break, src: str, *, imports: bool) -> verbs.CommandOutcome:
        set_by = f"{src} {message.number}"
        try:
            debugger, obj = self._debuggers.of_actor(message.mesh, message.rank)
            if message.clear:
                return verbs.CommandOutcome(f"{debugger.clear_breakpoints(set_by)} cleared")
            file, line, function = _resolve(message.where, obj, imports=imports)
            added = debugger.add_breakpoint(
                file,
                line,
                function=function,
                condition=message.condition,
                hit_condition=message.hit_condition,
                log=message.log,
                temporary=message.temporary,
                set_by=set_by,
                number=message.number,
            )
        except (LookupError, ValueError) as error:
            return verbs.CommandOutcome(error=text_of(error.args[0]))
        return verbs.CommandOutcome(f"{added.file}:{added.line}")

    def _break_set(self, message: verbs.BreakSet, asker: Asker[verbs.CommandOutcome]) -> verbs.CommandOutcome:
        armed = self._debuggers.take(asker.src, message)
        return verbs.CommandOutcome(f"{armed} armed")

    def _pause(self, message: verbs.Pause, asker: Asker[verbs.CommandOutcome]) -> verbs.CommandOutcome:
        paused, running = self._debuggers.pause(message.actors)
        if running and not paused:
            return verbs.CommandOutcome(error="nothing that runs there is traced: set a breakpoint in it first")
        return verbs.CommandOutcome(f"{paused} of {running} stop at their next line")

    def _freeze(self, message: verbs.Freeze, asker: Asker[verbs.CommandOutcome]) -> verbs.CommandOutcome:
        settings.configure({"debug_freeze_on_error": message.on})
        return verbs.CommandOutcome("frozen at errors" if message.on else "not frozen at errors")

    # -- stored failures, and stacks -----------------------------------------------------------------------------------

    def _autopsy(self, message: verbs.Autopsy, asker: Asker[verbs.CommandOutcome]) -> verbs.CommandOutcome:
        failures = self._runtime.failures
        if message.release:
            return verbs.CommandOutcome(f"{failures.release(message.mesh or None, message.rank)} released")
        stored = [
            failure
            for failure in failures.of(message.mesh, message.rank)
            if not message.call or failure.call == message.call
        ]
        if not stored:
            reason = (
                "no frames of this rank are kept: it has not failed, it failed longer ago than debug_keep_failures "
                "calls, its frames held more than debug_keep_bytes, or it ran out of memory"
            )
            return verbs.CommandOutcome(error=reason)
        return verbs.CommandOutcome(session=self._debuggers.open(stored[0]))

    def _stacks(self, _: Done, asker: Asker[verbs.Threads]) -> verbs.Threads:
        return verbs.Threads(_threads(tuple(self._runtime.cells.values())))


def _resolve(spec: str, obj: object, *, imports: bool = False) -> tuple[str, int, str]:
    """File, line and (of a function) its name, as the actor `obj` knows them; with `imports`, modules that the name
    begins with are imported. Raises LookupError.
    """
    match = _PLACE.fullmatch(spec)
    if match is not None:
        return _file_of(match["file"], obj), int(match["line"]), ""
    names = spec.split(".")
    target: object = next(
        (value for value in (_lookup(scope, names) for scope in _scopes(obj, names[0])) if value is not None), None
    )
    if target is None and imports:
        target = _imported(names, spec)
    target = target.method if isinstance(target, EndpointProperty) else target
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    code = getattr(target, "__code__", None)
    if code is None:
        origin = "that is known in cells here" if isinstance(obj, Console) else f"of {type(obj).__name__} or its module"
        raise LookupError(f"{spec} is neither file:line, nor a function {origin}, nor one of a module by its full name")
    return code.co_filename, code.co_firstlineno, code.co_name


def _scopes(obj: Any, first: str) -> list[Any]:
    """Scopes in which a function is searched: the class by name, its members, globals of methods, modules, all."""
    cls = type(obj)
    if isinstance(obj, Console):
        return [obj.namespace, sys.modules]
    scopes: list[object] = [{first: cls}] if first == cls.__name__ else []
    scopes.append(cls)
    for method in vars(cls).values():
        inner = method.method if isinstance(method, EndpointProperty) else method
        if hasattr(inner, "__globals__"):
            scopes.append(inner.__globals__)
            break
    return [*scopes, *(sys.modules.get(base.__module__) for base in cls.__mro__[:-1]), sys.modules]


def _imported(names: list[str], spec: str) -> object:
    """Returns the object with a full name, whose module is imported; None if there is no such module."""
    for length in range(len(names) - 1, 0, -1):
        name = ".".join(names[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise LookupError(f"{spec}: {name} cannot be imported: {text_of(error)}") from error
        except Exception as error:
            raise LookupError(f"{spec}: {name} cannot be imported: {error_line(error)}") from error
        return _lookup(module, names[length:])
    return None


def _lookup(scope: object, names: list[str]) -> object:
    value = scope
    for name in names:
        value = (
            value.get(name)
            if isinstance(value, dict)
            else getattr(value, "__dict__", {}).get(name, getattr(value, name, None))
        )
        if value is None:
            return None
    return value


def _file_of(name: str, obj: object) -> str:
    """Returns the file of code in this process that a short name stands for. Raises LookupError."""
    if os.path.isabs(name) or name.startswith("<"):
        return name
    files = {getattr(module, "__file__", None) or "" for module in tuple(sys.modules.values())}
    own = getattr(sys.modules.get(type(obj).__module__), "__file__", None)
    ending = os.sep + name.replace("/", os.sep)
    matching = sorted(file for file in {*files, *linecache.cache, own or ""} if file == name or file.endswith(ending))
    if own in matching:
        return str(own)
    if not matching:
        raise LookupError(
            f"no code in this process comes from a file {name}: check the name, or write more of its path"
        )
    if len(matching) > 1:
        raise LookupError(f"{name} may be {', '.join(matching[:4])}: write more of its path")
    return matching[0]


def _threads(cells: Iterable[ActorCell]) -> tuple[ThreadRecord, ...]:
    """Returns the threads of this process except the engine's; those of its actors, `cells`, once for each endpoint
    that runs.
    """
    frames = sys._current_frames()
    by_thread = {cell.executor.thread.ident: cell for cell in cells}
    records = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        cell = by_thread.get(thread.ident)
        if frame is None or (cell is None and thread.name.startswith("monarch-")):
            continue
        runs: list[ActorRun | None] = [*(runs_of(cell) if cell is not None else ())]
        if all(run is not None and suspended_frames(run.task) for run in runs):
            runs.append(None)  # the thread may run a task that none of them is
        for run in runs:
            steps = frames_of(run, frame) if run is not None else ()
            stack = [(step, step.f_lineno or step.f_code.co_firstlineno) for step in steps][::-1] or stacks.walk(frame)
            part = stacks.called_part(stack)
            if cell is not None and run is None:
                part = () if part[:1] == stack[:1] else part  # it waits for messages
            elif not part:
                part = stack
            records.append(
                ThreadRecord(
                    thread.name,
                    stacks.frames(part),
                    cell.spec.name if cell is not None else "",
                    cell.mesh if cell is not None else "",
                    cell.rank if cell is not None else 0,
                    run.endpoint if run is not None else "",
                    time.monotonic() - run.since if run is not None else 0.0,
                )
            )
    return tuple(records)
