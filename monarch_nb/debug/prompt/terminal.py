"""Terminals on which people see what is stopped and type commands."""

import sys
from collections.abc import Callable
from typing import Protocol


class NoPrompt(Exception):
    """No prompt can be shown here."""


class NothingToAsk(BaseException):
    """A question is of no use any more: nothing is stopped."""


class Terminal(Protocol):
    """Output and input of a prompt."""

    @property
    def can_ask(self) -> bool:
        """True if a person can type."""

    @property
    def echoes(self) -> bool:
        """True if typed text stays visible."""

    def write(self, text: str) -> None:
        """Shows text."""

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped; `again` in place of what was shown last, if it can: whether it was shown."""

    def beside(self) -> None:
        """Called once what is stopped was shown as text and questions follow: other views of it can be shown now."""

    def question_withdrawn(self) -> None:
        """A question was of no use any more: nothing is stopped."""

    def ask(self, prompt: str, useless: Callable[[], bool] = ...) -> str:
        """A typed line. Raises NoPrompt, EOFError, KeyboardInterrupt; NothingToAsk if it can detect that the question
        is `useless()`.
        """


class ScriptTerminal:
    """The terminal of a script."""

    @property
    def can_ask(self) -> bool:
        """True at a terminal with a person."""
        return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()

    @property
    def echoes(self) -> bool:
        """True: typed text stays on the screen."""
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

    def question_withdrawn(self) -> None:
        """Prints that nothing is left to ask."""
        self.write("» no rank is stopped any more\n")

    def beside(self) -> None:
        """Does nothing: a terminal has no other view."""

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """A typed line; waits even if it becomes useless. Raises NoPrompt, EOFError, KeyboardInterrupt."""
        if not self.can_ask:
            raise NoPrompt
        return input(prompt)
