"""pdb's language on the debugger of a thread: reads its lines with pdb's own code, and prints as pdb does.

Steps, breakpoints and evaluation use the debugger's own commands; pdb only parses lines and formats output.
"""

import bdb
import io
import pdb
import sys
import types
from typing import Any, TextIO

from monarch_nb.debug import verbs
from monarch_nb.debug.records import Value
from monarch_nb.debug.session.breakpoints import BreakpointTable, SessionBreakpoint
from monarch_nb.debug.session.commands import Commands
from monarch_nb.debug.session.machine import CommandError
from monarch_nb.debug.session.stack import is_expression
from monarch_nb.debug.session.values import shorten, value_of
from monarch_nb.wire import error_line

_ELSEWHERE = "is done at the controller's prompt, not on the rank"


class PdbText(pdb.Pdb):
    """Aliases last as long as the debugger; all other state belongs to the current stop."""

    tb_lineno: dict[types.FrameType, int]  # pdb's own

    def __init__(self, out: TextIO) -> None:
        super().__init__("tab", io.StringIO(), out, None, True, False)
        self.prompt = ""
        self._commands: Commands
        self._number = 0  # of the last stop that was used
        self._value: Value | None = None
        self._errors: list[object] = []

    def _load_breaks(self) -> None:
        """Breakpoints are the debugger's."""

    def run_line(self, commands: Commands, text: str) -> tuple[Value | None, list[object]]:
        """Carries out a line, or a statement of several lines; returns its value, and the errors."""
        self._commands = commands
        self._sync()
        self._value, self._errors = None, []
        self.cmdqueue = [text]
        while self.cmdqueue:
            line = self.precmd(self.cmdqueue.pop(0)) if "\n" not in text else self.cmdqueue.pop(0)
            if line.strip() and self.postcmd(self.onecmd(line), line):
                self.cmdqueue.clear()
                break
            if self.curindex != commands.standing.selected:
                commands.machine.select(self.curindex)
        return self._value, self._errors

    def _sync(self) -> None:
        """Takes over the frames and the selected frame of the debugger."""
        frames, standing = self._commands.frames, self._commands.standing
        if self._number != standing.number:
            self._number = standing.number
            self.forget()
            self._read_lines_of(self._commands.traceback)
        if self.curindex != standing.selected or self.curframe is None:
            self.lineno = None  # a listing begins anew
        self.stack = frames.entries
        self.curindex = standing.selected
        self.curframe = frames.frame(standing.selected)
        self._take_locals(frames.locals(standing.selected))

    def _take_locals(self, names: dict[str, Any]) -> None:
        if sys.version_info < (3, 14):  # newer versions read and write the frame itself
            self.curframe_locals = names

    def _read_lines_of(self, tb: types.TracebackType | None) -> None:
        while tb is not None:
            self.tb_lineno[tb.tb_frame] = tb.tb_lineno
            tb = tb.tb_next

    def _select_frame(self, number: int) -> None:
        self.curindex = number
        self.curframe = self._commands.frames.frame(number)
        self._take_locals(self._commands.frames.locals(number))
        self.lineno = None
        self.print_stack_entry(self.stack[number])

    # -- stepping -----------------------------------------------------------------------------------------------------

    def _go(self, command: verbs.Go) -> None:
        self._commands.machine.select(self.curindex)
        self._commands.go(command)

    def set_step(self) -> None:
        """step"""
        self._go(verbs.Go(session="", motion="in"))

    def set_next(self, frame: types.FrameType) -> None:
        """next"""
        self._go(verbs.Go(session="", motion="over"))

    def set_return(self, frame: types.FrameType) -> None:
        """return"""
        self._go(verbs.Go(session="", motion="out"))

    def set_until(self, frame: types.FrameType, lineno: int | None = None) -> None:
        """until"""
        self._go(verbs.Go(session="", motion="until", line=lineno))

    def set_continue(self) -> None:
        """continue"""
        self._go(verbs.Go(session="", motion="continue"))

    def do_jump(self, arg: str) -> bool | None:
        """j(ump) lineno
        Set the line that is run next, in the innermost frame.
        """
        try:
            line = int(arg)
        except ValueError:
            self.error("The 'jump' command requires a line number")
            return None
        try:
            if self._commands.jump(line):
                return True
        except CommandError as error:
            self.error(error)
            return None
        self.print_stack_entry(self.stack[self.curindex])
        return None

    do_j = do_jump

    def do_quit(self, arg: str) -> bool:
        """q(uit)
        End the endpoint: its caller gets an error.
        """
        self._commands.quit()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815

    # -- breakpoints --------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> BreakpointTable:
        return self._commands.machine.breakpoints

    @property
    def breaks(self) -> dict[str, list[int]]:
        """Lines with breakpoints, by file."""
        return self._table.lines

    @breaks.setter
    def breaks(self, lines: object) -> None:
        """Ignores pdb's own table: breakpoints are the debugger's."""

    def set_break(
        self, filename: str, lineno: int, temporary: bool = False, cond: str | None = None, funcname: str | None = None
    ) -> str | None:
        """Sets one; returns the error, if there is any."""
        try:
            self._commands.debugger.add_breakpoint(
                filename, lineno, temporary=bool(temporary), condition=cond or "", function=funcname or ""
            )
        except ValueError as error:
            return str(error)
        return None

    def get_breaks(self, filename: str, lineno: int) -> list[Any]:
        """Breakpoints at a line, in the order in which they were set."""
        file = self.canonic(filename)
        return [_PdbBreakpoint(bp) for bp in self._table if (bp.file, bp.line) == (file, lineno)]

    def get_bpbynumber(self, arg: Any) -> Any:
        """Returns a breakpoint by its typed number. Raises ValueError."""
        if not arg:
            raise ValueError("Breakpoint number expected")
        try:
            number = int(arg)
        except ValueError:
            raise ValueError(f"Non-numeric breakpoint number {arg}") from None
        of_number = self._table.get(number)
        if of_number is None:
            removed = 0 < number <= self._table.last_number
            raise ValueError(
                f"Breakpoint {number} already deleted" if removed else f"Breakpoint number {number} out of range"
            )
        return _PdbBreakpoint(of_number)

    def clear_bpbynumber(self, arg: Any) -> str | None:
        """Removes a breakpoint."""
        try:
            self._table.remove([self.get_bpbynumber(arg).breakpoint])
        except ValueError as error:
            return str(error)
        return None

    def clear_break(self, filename: str, lineno: int) -> str | None:
        """Removes the breakpoints of a line."""
        breakpoints = self.get_breaks(filename, lineno)
        if not breakpoints:
            return f"There is no breakpoint at {self.canonic(filename)}:{lineno}"
        self._table.remove(shown.breakpoint for shown in breakpoints)
        return None

    def do_break(self, arg: str, temporary: Any = 0) -> None:
        """b(reak) [ ([filename:]lineno | function) [, condition] ]
        Set a breakpoint, or list all of this rank.
        """
        if arg:
            super().do_break(arg, temporary)
        elif self._table:
            self.message("Num Type         Disp Enb   Where")
            for bp in self._table:
                self.message(_PdbBreakpoint(bp).bpformat())

    do_b = do_break

    def do_tbreak(self, arg: str) -> None:
        """tbreak [ ([filename:]lineno | function) [, condition] ]
        Set a breakpoint that goes when it is hit first.
        """
        self.do_break(arg, True)

    def do_clear(self, arg: str) -> None:
        """cl(ear) [filename:lineno | bpnumber ...]
        Clear these breakpoints, or all of this rank.
        """
        if arg:
            super().do_clear(arg)
            return
        every = list(self._table)
        self._table.remove(every)
        for bp in every:
            self.message(f"Deleted {_PdbBreakpoint(bp)}")

    do_cl = do_clear
    do_cond = pdb.Pdb.do_condition

    # -- inspecting ---------------------------------------------------------------------------------------------------

    def default(self, line: str) -> None:
        """Runs a statement or an expression in the selected frame."""
        text = line[1:] if line[:1] == "!" else line
        try:
            if is_expression(text):
                value = self._commands.frames.evaluate(text, self.curindex)
                if value is not None:
                    self._value = value_of(value)
            else:
                self._commands.frames.execute(text, self.curindex)
        except (Exception, SystemExit) as error:
            self._errors.append(error_line(error))

    def do_p(self, arg: str) -> None:
        """p expression
        Show the value of the expression.
        """
        self._show(arg, much=False)

    def do_pp(self, arg: str) -> None:
        """pp expression
        Show the value of the expression, more of it.
        """
        self._show(arg, much=True)

    def _show(self, arg: str, *, much: bool) -> None:
        try:
            self._value = value_of(self._commands.frames.evaluate(arg, self.curindex), much=much)
        except (Exception, SystemExit) as error:
            self._errors.append(error_line(error))

    def _getval(self, arg: str) -> object:
        try:
            return self._commands.frames.evaluate(arg, self.curindex)
        except (Exception, SystemExit) as error:
            self._errors.append(error_line(error))
            raise

    def _safe_repr(self, obj: object, expr: str) -> str:
        return shorten(obj)

    def error(self, msg: object) -> None:
        """Records the error of a command; pdb passes exceptions, too."""
        self._errors.append(msg)

    # -- unsupported commands -----------------------------------------------------------------------------------------

    def do_interact(self, arg: str) -> None:
        """interact
        Type Python until an empty `exit`.
        """
        self.error(f"interact {_ELSEWHERE}")

    def do_commands(self, arg: str) -> None:
        """commands
        Not here.
        """
        self.error("`commands` is not supported: give the breakpoint a condition, or use display")

    def do_debug(self, arg: str) -> None:
        """debug
        Not here.
        """
        self.error("`debug` is not supported: set a breakpoint in the function that you want to see")

    do_run = do_restart = lambda self, arg: self.error(
        "an endpoint cannot be run again from here: quit, then call it again"
    )


class _PdbBreakpoint(bdb.Breakpoint):
    """A breakpoint in the form that pdb shows and changes."""

    def __init__(self, breakpoint: SessionBreakpoint) -> None:
        self.breakpoint = breakpoint
        self.number, self.file, self.line = breakpoint.number, breakpoint.file, breakpoint.line
        self.temporary, self.hits = breakpoint.temporary, breakpoint.hits
        self.funcname = breakpoint.function or None

    @property
    def enabled(self) -> bool:
        """True if it stops."""
        return self.breakpoint.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self.breakpoint.enabled = on

    @property
    def cond(self) -> str | None:
        """The condition."""
        return self.breakpoint.condition or None

    @cond.setter
    def cond(self, condition: str | None) -> None:
        self.breakpoint.condition = condition or ""

    @property
    def ignore(self) -> int:
        """Number of passes to ignore."""
        return self.breakpoint.ignore

    @ignore.setter
    def ignore(self, count: int) -> None:
        self.breakpoint.ignore = count
