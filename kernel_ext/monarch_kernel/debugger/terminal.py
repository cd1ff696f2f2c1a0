"""The one place from which a cell asks for a line: front ends have a single, unlocked channel for answers."""

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.debug.prompt import NoPrompt, NothingToAsk
from monarch_nb.settings import settings
from monarch_nb.transport import throw_into

from ..front import Front
from ..jupyter import takes_input

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOOK_S = 0.1  # between looks whether a question that waits is still of use
USELESS = 4  # looks in a row at which it was not: a step lets ranks go for a moment


class CellTerminal:
    """The prompt in a cell. Asks one question at a time, and only while a cell runs: later answers never arrive."""

    def __init__(self, shell: "InteractiveShell", front: Front, beside: Callable[[], bool] = lambda: False) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)
        self._front = front
        self._asking = threading.Lock()
        self._beside = beside
        self._has_view = False
        self._table_id = ""

    @property
    def echoes(self) -> bool:
        """True if the front end keeps typed text visible: VS Code asks in a box of its own and shows nothing of it."""
        return "__vsc_ipynb_file__" not in self._shell.user_ns

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped, in place of what was shown last where front ends can replace it."""
        if again and not self._front.has_displays:
            return False
        if not again:
            self._table_id = f"monarch-{secrets.token_hex(8)}"
        self._front.display({"text/plain": text}, self._table_id, update=again)
        return True

    def beside(self) -> None:
        """Shows the live view below the table, where there are widgets."""
        self._has_view = self._beside()

    def gone(self) -> None:
        """Prints that nothing is left to ask; the view, where there is one, does so at the question itself."""
        if not self._has_view:
            self.write("» no rank is stopped any more\n")

    @property
    def can_ask(self) -> bool:
        """True if the front end of the running cell takes questions, and the user wants any (`debug_prompt`)."""
        if not self._front.running or not settings.debug_prompt:
            return False
        return self._kernel is None or takes_input(self._kernel)

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """A typed line; blocks. Raises NoPrompt, EOFError, KeyboardInterrupt on the main thread; and NothingToAsk once
        `useless()` has been true for a while: an answer would change nothing. A terminal waits all the same.
        """
        if not self.can_ask:
            raise NoPrompt
        with self._asking:
            if self._kernel is None:
                return input(prompt)
            try:
                return self._asked(prompt, useless)
            except NotImplementedError:  # StdinNotImplementedError
                raise NoPrompt from None

    def _asked(self, prompt: str, useless: Callable[[], bool]) -> str:
        answered, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()

        def look() -> None:
            times = 0
            while not answered.wait(LOOK_S):
                times = times + 1 if useless() else 0
                with lock:
                    if times >= USELESS and not answered.is_set() and throw_into(thread, NothingToAsk):
                        return

        threading.Thread(target=look, name="monarch-prompt", daemon=True).start()
        try:
            return str(self._kernel.raw_input(prompt))
        finally:
            with lock:
                answered.set()

    def write(self, text: str) -> None:
        """Shows text in the cell."""
        self._front.write(text)
