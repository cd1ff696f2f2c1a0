"""The breakpoints of one debugger, kept apart from those of other actors in the process."""

import bdb
import pdb
import types
from collections.abc import Callable

from monarch_nb.debug.session.frames import Inquiry
from monarch_nb.wire import error_line


class Breaks(Inquiry):
    """Knows its own breakpoints among those of the process, which bdb numbers together."""

    def __init__(self, armed: Callable[[], None]) -> None:
        super().__init__()
        self.breaks: dict[str, list[int]] = {}  # not those of other actors in this process
        self.numbers: dict[int, list[bdb.Breakpoint]] = {}  # by the controller's numbers
        self._mine: list[bdb.Breakpoint] = []
        self._armed = armed  # called when one is set
        self._reason = ""
        self._note = ""

    @property
    def newest(self) -> bdb.Breakpoint:
        """The breakpoint that was set last."""
        return self._mine[-1]

    def break_here(self, frame: types.FrameType) -> bool:
        """Whether a breakpoint of this debugger, and of no other in the process, is at this line and holds."""
        name = self.canonic(frame.f_code.co_filename)
        if name not in self.breaks:
            return False
        line, first = frame.f_lineno, frame.f_code.co_firstlineno
        here = [
            one
            for one in self._mine
            if one.enabled
            and one.file == name
            and one.line == (first if one.funcname else line)
            and bdb.checkfuncname(one, frame)
        ]
        holding = [one for one in here if self._holds(one, frame)]  # each counts its hits
        return bool(holding)

    def _holds(self, one: bdb.Breakpoint, frame: types.FrameType) -> bool:
        one.hits += 1
        note = ""
        if one.cond:
            try:
                if not eval(one.cond, {**frame.f_globals, **frame.f_locals}):
                    return False
            except (Exception, SystemExit) as error:  # whoever wrote it wants to know
                note = f"its condition `{one.cond}` raised {error_line(error)}"
        if one.ignore > 0:
            one.ignore -= 1
            return False
        self.currentbp = one.number
        self._reason = f"breakpoint {one.number}" + (f", if {one.cond}" if one.cond else "")
        self._note = note
        if one.temporary:
            self.forget_break(one)
        return True

    def set_break(
        self, filename: str, lineno: int, temporary: bool = False, cond: str | None = None, funcname: str | None = None
    ) -> str | None:
        """As bdb's; and endpoints are traced from now on."""
        wrong = super().set_break(filename, lineno, temporary, cond, funcname)
        if not wrong:
            newest = bdb.Breakpoint.bpbynumber[-1]
            assert newest is not None
            self._mine.append(newest)
            self._armed()
        return wrong

    def forget_break(self, one: bdb.Breakpoint) -> None:
        """Takes a breakpoint away."""
        if one in self._mine:
            self._mine.remove(one)
        lines = self.breaks.get(one.file, [])
        if one.line in lines and not any((b.file, b.line) == (one.file, one.line) for b in self._mine):
            lines.remove(one.line)
            if not lines:
                del self.breaks[one.file]
        if bdb.Breakpoint.bpbynumber[one.number] is one:
            one.deleteMe()

    def do_clear(self, arg: str) -> None:
        """cl(ear) [filename:lineno | bpnumber ...]
        Clear these breakpoints, or all of this rank.
        """
        if arg:
            before = {number for number, one in enumerate(bdb.Breakpoint.bpbynumber) if one is not None}
            super().do_clear(arg)
            left = {number for number, one in enumerate(bdb.Breakpoint.bpbynumber) if one is not None}
            self._mine = [one for one in self._mine if one.number not in before - left]
            return
        for one in tuple(self._mine):
            self.message(f"Deleted {one}")
            self.forget_break(one)

    do_cl = do_clear
    do_cond = pdb.Pdb.do_condition
