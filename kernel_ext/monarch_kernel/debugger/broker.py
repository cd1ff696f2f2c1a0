"""The one place from which a cell asks for a line: front ends have a single, unlocked channel for answers."""

import threading
from typing import Any

from monarch_nb.debug.prompt import NoPrompt

from ..front import Front


class Broker:
    """Asks one question at a time, and only while a cell runs: an answer to another one would never come."""

    def __init__(self, shell: Any, front: Front) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._front = front
        self._asking = threading.Lock()

    @property
    def can_ask(self) -> bool:
        """Whether the front end of the running cell takes questions."""
        if not self._front.running:
            return False
        return self._kernel is None or bool(getattr(self._kernel, "_allow_stdin", True))

    def ask(self, prompt: str) -> str:
        """One line; blocks. Raises NoPrompt, EOFError, and KeyboardInterrupt on the main thread."""
        if not self.can_ask:
            raise NoPrompt
        with self._asking:
            if self._kernel is None:
                return input(prompt)
            try:
                return str(self._kernel.raw_input(prompt))
            except NotImplementedError:  # StdinNotImplementedError
                raise NoPrompt from None

    def write(self, text: str) -> None:
        """Shows text in the cell."""
        self._front.write(text)
