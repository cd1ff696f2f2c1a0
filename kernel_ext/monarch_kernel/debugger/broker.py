"""The one place from which a cell asks for a line: front ends have a single, unlocked channel for answers."""

import threading
from collections.abc import Callable
from typing import Any

from monarch_nb.debug.prompt import NoPrompt, Vain
from monarch_nb.transport import throw_into

from ..front import Front

LOOK_S = 0.1  # between looks whether a question that waits is still of use
VAIN = 4  # looks in a row at which it was not: a step lets ranks go for a moment


class Broker:
    """Asks one question at a time, and only while a cell runs: an answer to another one would never come."""

    def __init__(self, shell: Any, front: Front, beside: Callable[[], None] = lambda: None) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        self._front = front
        self._asking = threading.Lock()
        self.beside = beside

    @property
    def can_ask(self) -> bool:
        """Whether the front end of the running cell takes questions."""
        if not self._front.running:
            return False
        return self._kernel is None or bool(getattr(self._kernel, "_allow_stdin", True))

    def ask(self, prompt: str, vain: Callable[[], bool] = lambda: False) -> str:
        """One line; blocks. Raises NoPrompt, EOFError, KeyboardInterrupt on the main thread; and Vain when `vain()` is
        found true for a while: whoever types answers in vain. A terminal waits for its line all the same.
        """
        if not self.can_ask:
            raise NoPrompt
        with self._asking:
            if self._kernel is None:
                return input(prompt)
            try:
                return self._asked(prompt, vain)
            except NotImplementedError:  # StdinNotImplementedError
                raise NoPrompt from None

    def _asked(self, prompt: str, vain: Callable[[], bool]) -> str:
        answered, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()

        def look() -> None:
            times = 0
            while not answered.wait(LOOK_S):
                times = times + 1 if vain() else 0
                with lock:
                    if times >= VAIN and not answered.is_set():
                        throw_into(thread, Vain)
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
