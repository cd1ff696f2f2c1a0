"""What can be asked of a stopped frame: expressions, statements, local variables."""

import ctypes
import io
import pdb
import sys
import types
from typing import Any

from monarch_nb.debug.records import Value
from monarch_nb.debug.session.redirect import redirected
from monarch_nb.debug.session.values import shorten, value_of
from monarch_nb.wire import error_line, text_of


class Inquiry(pdb.Pdb):
    """A pdb that answers with values and texts instead of writing to a terminal."""

    def __init__(self) -> None:
        self._out = io.StringIO()
        super().__init__("tab", io.StringIO(), self._out, ("monarch_nb.*", "asyncio.*", "threading"), True, False)
        self.prompt = ""
        self._value: Value | None = None
        self._error = ""
        self._locals: dict[str, Value] = {}

    def _take(self) -> str:
        text = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return text

    def _evaluate(self, text: str) -> None:
        try:
            self._value = value_of(self._get(text), much=True)
        except (Exception, SystemExit) as error:
            self._error = error_line(error)

    def _get(self, text: str) -> Any:
        frame = self._frame
        code = compile(text.strip(), "<mdb>", "eval")
        with redirected(self._out):
            # One dictionary, so that what is inside of comprehensions and lambdas sees the locals.
            return eval(code, {**frame.f_globals, **self.curframe_locals})

    @property
    def _frame(self) -> types.FrameType:
        assert self.curframe is not None  # there is one for as long as it is stopped
        return self.curframe

    def _getval(self, arg: str) -> Any:
        try:
            return self._get(arg)
        except (Exception, SystemExit) as error:
            self._error = error_line(error)
            raise

    def _all_locals(self, names: str) -> dict[str, Value]:
        wanted = names.split()
        return {
            name: value_of(value)
            for name, value in tuple(self.curframe_locals.items())
            if (name in wanted if wanted else not name.startswith("__"))
        }

    def default(self, line: str) -> None:
        """A statement or an expression in the frame that is looked at."""
        text = line[1:] if line[:1] == "!" else line
        try:
            try:
                code = compile(text.strip(), "<mdb>", "eval")
            except SyntaxError:
                code = compile(text if text.endswith("\n") else f"{text}\n", "<mdb>", "exec")
            else:
                value = self._get(text)
                if value is not None:
                    self._value = value_of(value)
                return
            with redirected(self._out):
                exec(code, self._frame.f_globals, self.curframe_locals)
            _write_back(self._frame)
        except (Exception, SystemExit) as error:
            self._error = error_line(error)

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
            self._value = value_of(self._get(arg), much=much)
        except (Exception, SystemExit) as error:
            self._error = error_line(error)

    def _safe_repr(self, obj: Any, expr: str) -> str:
        return shorten(obj)

    def error(self, msg: object) -> None:
        """What went wrong with a command; pdb hands exceptions over, too."""
        self._error = f"{self._error}; {msg}" if self._error else text_of(msg)


def _write_back(frame: types.FrameType) -> None:
    """Assignments to locals take effect; newer Pythons need no help."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
