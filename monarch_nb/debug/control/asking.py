"""Answers that the debugger waits for: while a thread does, no prompt opens in waits of its own."""

import threading
from typing import TypeVar

from monarch_nb.debug.messages import CommandOutcome
from monarch_nb.runtime import Future
from monarch_nb.settings import settings
from monarch_nb.wire import text_of

T = TypeVar("T")
ANSWER_S = 5.0  # in addition to debug_command_timeout, for an answer to arrive


class Asking(threading.local):
    """Marks threads that wait for an answer to the debugger."""

    waiting = False

    def answer(self, future: "Future[T]", timeout: float) -> T:
        """Returns the answer; blocks. Raises what `Future.get` does."""
        self.waiting = True
        try:
            return future.get(timeout)
        finally:
            self.waiting = False


asking = Asking()


def outcome_of(future: "Future[CommandOutcome]") -> CommandOutcome:
    """Returns the outcome, or an outcome with the error."""
    try:
        return asking.answer(future, settings.debug_command_timeout)
    except Exception as error:
        return CommandOutcome(error=text_of(error))
