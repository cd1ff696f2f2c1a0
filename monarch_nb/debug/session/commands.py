"""The commands that a thread carries out while it stands: each with its answer."""

import linecache
import types
from collections.abc import Callable
from typing import Any, Protocol

from monarch_nb.debug import messages as m
from monarch_nb.debug.records import RankBreakpoint, Value
from monarch_nb.debug.session.breakpoints import Breakpoint
from monarch_nb.debug.session.frames import Frames, is_expression
from monarch_nb.debug.session.machine import CommandError, Machine, Resume, Standing
from monarch_nb.debug.session.values import value_of
from monarch_nb.debug.session.variables import Variables
from monarch_nb.wire import error_line, text_of

Handler = Callable[[Any], m.Answer]
LONGEST = 4 << 20  # characters of a file that are sent: proxies of notebooks cut longer messages


class Language(Protocol):
    """A language of commands, such as pdb's."""

    def run_line(self, commands: "Commands", text: str) -> tuple[Value | None, list[object]]:
        """Carries a line out: the value that it had, and what went wrong."""


class Debugger(Protocol):
    """What the commands of a stop need of the debugger of the thread, which outlives them."""

    @property
    def machine(self) -> Machine:
        """Where the thread stands."""

    def add_breakpoint(self, file: str, line: int, **options: Any) -> Breakpoint:
        """Sets a breakpoint. Raises ValueError."""

    def pdb_text(self) -> Language:
        """pdb's language."""


class Commands:
    """Those of one stop. `resume` says how the thread is to go on, once a command has said that it is."""

    def __init__(self, debugger: Debugger, frames: Frames, tb: types.TracebackType | None) -> None:
        self.debugger = debugger
        self.machine = debugger.machine
        self.frames = frames
        self.variables = Variables(frames)
        self.traceback = tb
        self.resume: Resume | None = None
        self.quits = False
        self._handlers: dict[type[m.Command], Handler] = {
            m.Go: self._go,
            m.Jump: self._jump,
            m.Quit: self._quit,
            m.Select: self._select,
            m.Evaluate: self._evaluate,
            m.GetVariables: self._variables,
            m.GetScopes: self._scopes,
            m.Assign: self._assign,
            m.GetSource: self._source,
            m.GetBreakpoints: self._breakpoints,
            m.Pdb: self._pdb,
        }

    def carry_out(self, command: m.Command) -> m.Answer:
        """The answer to a command, but for what was printed and where it stands. What the user's code raises is told
        there; raises CommandTimeout and KeyboardInterrupt.
        """
        try:
            if command.frame is not None:
                self.machine.select(command.frame)
            return self._handlers[type(command)](command)
        except CommandError as error:
            why = str(error)
        except (Exception, SystemExit) as error:
            why = error_line(error)
        return m.Answer(session=command.session, error=why)

    @property
    def standing(self) -> Standing:
        """Where the thread stands. Raises CommandError where it does not any more."""
        standing = self.machine.standing
        if standing is None:
            raise CommandError("the rank is not stopped any more")
        return standing

    # -- going on -----------------------------------------------------------------------------------------------------

    def _go(self, command: m.Go) -> m.Answer:
        self.go(command)
        return m.Answer(session=command.session, resumed=True)

    def go(self, command: m.Go) -> None:
        """The thread is to go on."""
        at = self.frames.entries[self.standing.selected][1]
        if command.motion == "until" and command.line is not None and command.line <= at:
            raise CommandError('"until" line number is smaller than current line number')
        self.resume = self.machine.go(command.motion, command.line)

    def _jump(self, command: m.Jump) -> m.Answer:
        return m.Answer(session=command.session, resumed=self.jump(command.line))

    def jump(self, line: int) -> bool:
        """Another line is to be run next: whether the thread has to go on for that, to the next line."""
        self.resume = self.machine.jump(line)
        if self.resume is not None:
            return True
        try:
            self.frames.move(self.standing.selected, line)
        except ValueError as error:
            raise CommandError(f"Jump failed: {error}") from None
        return False

    def _quit(self, command: m.Quit) -> m.Answer:
        self.quit()
        return m.Answer(session=command.session, resumed=True)

    def quit(self) -> None:
        """The endpoint is to end."""
        self.machine.released()
        self.quits = True

    # -- looking ------------------------------------------------------------------------------------------------------

    def _select(self, command: m.Select) -> m.Answer:
        if command.by:
            self.machine.move(command.by)
        return m.Answer(session=command.session)

    def _evaluate(self, command: m.Evaluate) -> m.Answer:
        if command.statement and not is_expression(command.text):
            self.frames.execute(command.text, self.standing.selected)
            return m.Answer(session=command.session)
        value = self.frames.evaluate(command.text, self.standing.selected)
        if value is None and command.statement:
            return m.Answer(session=command.session)
        return self._valued(command, command.text, value, much=command.much)

    def _valued(self, command: m.Command, expression: str, value: Any, *, much: bool = False) -> m.Answer:
        reference, named, indexed = self.variables.reference(value, expression, self.standing.selected)
        return m.Answer(
            session=command.session,
            value=value_of(value, much=much),
            reference=reference,
            named=named,
            indexed=indexed,
        )

    def _variables(self, command: m.GetVariables) -> m.Answer:
        if command.reference:
            variables, total = self.variables.children(command.reference, command.start, command.count)
        else:
            variables = self.variables.locals(self.standing.selected, command.names)
            total = len(variables)
        return m.Answer(session=command.session, variables=variables, total=total)

    def _scopes(self, command: m.GetScopes) -> m.Answer:
        return m.Scopes(session=command.session, scopes=self.variables.scopes(self.standing.selected))

    def _assign(self, command: m.Assign) -> m.Answer:
        selected = self.standing.selected
        value = self.frames.evaluate(command.text, selected)
        self.variables.assign(command.reference, command.name, value, selected)
        return self._valued(command, "", value)

    def _source(self, command: m.GetSource) -> m.Answer:
        names = next((f.f_globals for f, _ in self.frames.entries if f.f_code.co_filename == command.file), None)
        lines = linecache.getlines(command.file, names)
        if not lines:
            raise CommandError(f"the source of {command.file} is not to be had on this rank")
        return m.Source(session=command.session, content="".join(lines)[:LONGEST])

    def _breakpoints(self, command: m.GetBreakpoints) -> m.Answer:
        fields = RankBreakpoint.__struct_fields__
        breakpoints = tuple(
            RankBreakpoint(**{name: getattr(each, name) for name in fields}) for each in self.machine.breakpoints
        )
        return m.Breakpoints(session=command.session, breakpoints=breakpoints)

    def _pdb(self, command: m.Pdb) -> m.Answer:
        value, errors = self.debugger.pdb_text().run_line(self, command.text)
        return m.Answer(
            session=command.session,
            value=value,
            error="; ".join(map(text_of, errors)),
            resumed=self.machine.standing is None,
        )
