"""%%prof: a cell, and where the ranks of a mesh spend their time while it runs."""

import ast
import inspect
from types import CodeType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand

from .arguments import read_profile
from .display.errors import cell_syntax
from .jupyter import give_back_underscores
from .session import Session

if TYPE_CHECKING:
    from monarch_nb.profiling import Profile


@magics_class
class ProfileMagics(Magics):
    """%%prof."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self._session = session

    @no_var_expand
    @cell_magic
    def prof(self, line: str, cell: str) -> "Profile":
        """Run a cell, and show where every rank of a mesh spends its time meanwhile.

        %%prof NAME [dim=0] [dim=0-2,5] ... [--hz N] [--torch]

            %%prof trainers                  # what differs between ranks, and a flame graph for each group of them
            trainers.step.call().get()

            %%prof trainers gpus=0-3 --hz 500
            %%prof trainers --torch          # also PyTorch's traces of all ranks, as one file for Perfetto

        The stacks of all ranks are sampled, 100 times a second; no code changes and nothing has to be installed there.
        The cell runs here as it would without the first line, and what it gives is shown above the profile; the profile
        is in `_`. A cell that fails or is interrupted shows what was sampled until then. The cell cannot `await`: use
        the Python form for that. From Python: with monarch.profile(trainers) as found: ...
        """
        from monarch_nb.profiling import profile

        given = read_profile(line)
        part = given.place.of(self._session.find(given.place.name))
        statements, last = self._compiled(cell)
        found: Profile | None = None
        try:
            with profile(part, hz=given.hz, torch=given.torch) as found:
                self._run(statements, last)
        except BaseException:
            if found is not None:
                self._show(found)
            raise
        give_back_underscores(self.shell)
        return found

    def _compiled(self, cell: str) -> tuple[CodeType, CodeType | None]:
        """The cell's statements, and its last expression, if it ends in one."""
        shell: Any = self.shell
        with cell_syntax():
            source = shell.transform_cell(cell)
            file = shell.compile.cache(source, shell.execution_count)
            tree = ast.parse(source, file)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            statements = compile(tree, file, "exec", flags, dont_inherit=True)
            value = (
                None if last is None else compile(ast.Expression(last.value), file, "eval", flags, dont_inherit=True)
            )
        if any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in (statements, value)):
            raise UsageError(
                "%%prof cannot `await`. In a cell without it, write: with monarch.profile(NAME) as found: …, then found"
            )
        return statements, value

    def _run(self, statements: CodeType, last: CodeType | None) -> None:
        shell: Any = self.shell
        exec(statements, shell.user_ns)
        value = None if last is None else eval(last, shell.user_ns)
        if value is not None:
            self._show(value)

    def _show(self, value: Any) -> None:
        from IPython.display import display

        display(value)  # type: ignore[no-untyped-call]
