"""Where people read what is stopped and type what is to be done."""

import sys
from collections.abc import Callable
from typing import Protocol


class NoPrompt(Exception):
    """Nobody can be asked here."""


class NothingToAsk(BaseException):
    """A question is of no use any more: nothing is stopped."""


class Terminal(Protocol):
    """Where people read and type."""

    @property
    def can_ask(self) -> bool:
        """Whether there is anybody to type."""

    @property
    def echoes(self) -> bool:
        """Whether what was typed stays to be seen."""

    def write(self, text: str) -> None:
        """Shows text."""

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped; `again` in place of what was shown last, if it can: whether it was shown."""

    def beside(self) -> None:
        """What is stopped has been shown as text, and questions follow: whatever else shows it can be shown now."""

    def gone(self) -> None:
        """A question was of no use any more: nothing is stopped."""

    def ask(self, prompt: str, useless: Callable[[], bool] = ...) -> str:
        """One line that was typed. Raises NoPrompt, EOFError, KeyboardInterrupt; NothingToAsk if it can detect that the
        question is `useless()`.
        """


class Console:
    """The terminal of a script."""

    @property
    def can_ask(self) -> bool:
        """Whether a person sits there."""
        return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()

    @property
    def echoes(self) -> bool:
        """What is typed stays on the screen."""
        return True

    def write(self, text: str) -> None:
        """Shows text."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped, once: what is on the screen stays as it is."""
        if not again:
            self.write(f"{text}\n")
        return not again

    def gone(self) -> None:
        """Says that there is nothing to ask for."""
        self.write("» no rank is stopped any more\n")

    def beside(self) -> None:
        """Nothing else."""

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """One line; waits for it however useless it becomes. Raises NoPrompt, EOFError, KeyboardInterrupt."""
        if not self.can_ask:
            raise NoPrompt
        return input(prompt)
