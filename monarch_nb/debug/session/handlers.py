"""What controllers ask of the debuggers of a process: the handlers of the debugger's verbs, on the reading thread."""

import threading

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.debug.session.debuggers import Debuggers
from monarch_nb.debug.session.places import resolve
from monarch_nb.debug.session.thread import NOT_STOPPED
from monarch_nb.debug.session.threads import threads
from monarch_nb.runtime import Runtime
from monarch_nb.settings import settings
from monarch_nb.wire import Asker, Done, text_of


class Handlers:
    """Those of one process."""

    def __init__(self, engine: Runtime, debuggers: Debuggers) -> None:
        self._engine = engine
        self._debuggers = debuggers
        for command in verbs.COMMANDS.values():
            engine.verbs.handle(command, self._command)
        engine.verbs.handle(verbs.BREAK, self._break)
        engine.verbs.handle(verbs.BREAK_SET, self._break_set)
        engine.verbs.handle(verbs.PAUSE, self._pause)
        engine.verbs.handle(verbs.AUTOPSY, self._autopsy)
        engine.verbs.handle(verbs.STACKS, self._stacks)
        engine.verbs.handle(verbs.LEASE, self._lease)
        engine.verbs.handle(verbs.FREEZE, self._freeze)

    # -- commands for stopped threads ---------------------------------------------------------------------------------

    def _command(self, command: m.Command, asker: Asker[m.Answer]) -> m.Answer | None:
        self._debuggers.heard()
        debugger = self._debuggers.of_session(command.session)
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
        self._debuggers.heard()

    # -- breakpoints from outside --------------------------------------------------------------------------------------

    def _break(self, wanted: m.Break, asker: Asker[m.Outcome]) -> m.Outcome | None:
        outcome = self._broken(wanted, asker.src, imports=False)
        if not outcome.error or "." not in wanted.where:
            return outcome
        # The module may have to be imported; the reading thread runs no user code.
        retry = threading.Thread(
            target=lambda: asker.reply(self._broken(wanted, asker.src, imports=True)), name="monarch-break", daemon=True
        )
        retry.start()
        return None

    def _broken(self, wanted: m.Break, src: str, *, imports: bool) -> m.Outcome:
        set_by = f"{src} {wanted.number}"
        try:
            debugger, obj = self._debuggers.of_actor(wanted.mesh, wanted.rank)
            if wanted.clear:
                return m.Outcome(f"{debugger.clear_breakpoints(set_by)} cleared")
            file, line, function = resolve(wanted.where, obj, imports=imports)
            added = debugger.add_breakpoint(
                file,
                line,
                function=function,
                condition=wanted.condition,
                hit_condition=wanted.hit_condition,
                log=wanted.log,
                temporary=wanted.temporary,
                set_by=set_by,
                number=wanted.number,
            )
        except (LookupError, ValueError) as error:
            return m.Outcome(error=text_of(error.args[0]))
        return m.Outcome(f"{added.file}:{added.line}")

    def _break_set(self, wanted: m.BreakSet, asker: Asker[m.Outcome]) -> m.Outcome:
        armed = self._debuggers.take(asker.src, wanted)
        return m.Outcome(f"{armed} armed")

    def _pause(self, wanted: m.Pause, asker: Asker[m.Outcome]) -> m.Outcome:
        paused, running = self._debuggers.pause(wanted.actors)
        if running and not paused:
            return m.Outcome(error="nothing that runs there is traced: set a breakpoint in it first")
        return m.Outcome(f"{paused} of {running} stop at their next line")

    def _freeze(self, wanted: m.Freeze, asker: Asker[m.Outcome]) -> m.Outcome:
        settings.configure({"debug_freeze_on_error": wanted.on})
        return m.Outcome("frozen at errors" if wanted.on else "not frozen at errors")

    # -- failures that are kept, and where everything is ---------------------------------------------------------------

    def _autopsy(self, wanted: m.Autopsy, asker: Asker[m.Outcome]) -> m.Outcome:
        failures = self._engine.failures
        if wanted.release:
            return m.Outcome(f"{failures.release(wanted.mesh or None, wanted.rank)} released")
        kept = [each for each in failures.of(wanted.mesh, wanted.rank) if not wanted.call or each.call == wanted.call]
        if not kept:
            reason = (
                "no frames of this rank are kept: it has not failed, it failed longer ago than debug_keep_failures "
                "calls, its frames held more than debug_keep_bytes, or it ran out of memory"
            )
            return m.Outcome(error=reason)
        return m.Outcome(session=self._debuggers.open(kept[0]))

    def _stacks(self, _: Done, asker: Asker[m.Threads]) -> m.Threads:
        return m.Threads(threads(tuple(self._engine.cells.values())))
