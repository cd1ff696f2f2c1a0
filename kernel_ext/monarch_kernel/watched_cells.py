"""Cells that run here while a context observes ranks: `%%prof` and `%%watch`."""

import ast
import inspect
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from monarch_nb._parsing import parsed

from .display.errors import cell_syntax
from .jupyter import give_back_underscores, transformed

F = TypeVar("F")


def run_within(shell: InteractiveShell, cell: str, context: AbstractContextManager[F], python_form: str) -> F:
    """Runs a cell as usual within a context, shows its value, and returns the value of the context for display.

    A cell that fails or is interrupted shows what the context has found until then. Raises UsageError for a cell with
    `await`, which says to write `python_form`.
    """
    statements, last = _compiled(shell, cell, python_form)
    result: F | None = None
    try:
        with context as result:
            exec(statements, shell.user_ns)
            value = None if last is None else eval(last, shell.user_ns)
            if value is not None:
                _show(value)
    except BaseException:
        if result is not None:
            _show(result)
        raise
    give_back_underscores(shell)
    return result


def _compiled(shell: InteractiveShell, cell: str, python_form: str) -> tuple[CodeType, CodeType | None]:
    """Returns the cell's statements, and its last expression, if it ends in one."""
    with cell_syntax():
        source = transformed(shell, cell)
        file = shell.compile.cache(source, shell.execution_count)
        tree = parsed(source, file)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if last is not None:
            tree.body.pop()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        statements = compile(tree, file, "exec", flags, dont_inherit=True)
        value = None if last is None else compile(ast.Expression(last.value), file, "eval", flags, dont_inherit=True)
    if any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in (statements, value)):
        raise UsageError(f"the cell of this magic cannot `await`. In a cell without it, write: {python_form}")
    return statements, value


def _show(value: Any) -> None:
    display(value)  # type: ignore[no-untyped-call]
