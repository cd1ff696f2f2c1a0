"""Terminals that show stopped ranks and read typed commands."""

import sys
from collections.abc import Callable
from typing import Protocol


class NoPrompt(Exception):
    """No prompt can be shown here."""


class NothingToAsk(BaseException):
    """A question has become useless: no rank is stopped any more."""


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
        """Shows the stopped ranks, with `again` in place of the last table if possible; returns whether it has."""

    def beside(self) -> None:
        """Shows other views of the stopped ranks; called after the table, before the first question."""

    def question_withdrawn(self) -> None:
        """Called when a question has become useless, since no rank is stopped any more."""

    def ask(self, prompt: str, useless: Callable[[], bool] = ...) -> str:
        """Reads a line. Raises NoPrompt, EOFError, KeyboardInterrupt; NothingToAsk if it can detect that the question
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
        """Shows the stopped ranks once: text on the screen is not replaced."""
        if not again:
            self.write(f"{text}\n")
        return not again

    def question_withdrawn(self) -> None:
        """Prints that nothing is left to ask."""
        self.write("» no rank is stopped any more\n")

    def beside(self) -> None:
        """Does nothing: a terminal has no other view."""

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """Returns a typed line; waits even if it becomes useless. Raises NoPrompt, EOFError, KeyboardInterrupt."""
        if not self.can_ask:
            raise NoPrompt
        return input(prompt)
