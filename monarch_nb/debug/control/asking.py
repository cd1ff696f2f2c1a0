"""Answers that the debugger waits for: while a thread does, no prompt opens in waits of its own."""

import threading
from typing import TypeVar

from monarch_nb.debug.messages import Told
from monarch_nb.runtime import Future
from monarch_nb.settings import settings
from monarch_nb.wire import text_of

T = TypeVar("T")
ANSWER_S = 5.0  # beyond debug_command_timeout, for an answer to arrive


class Asking(threading.local):
    """Whether the calling thread waits for an answer to the debugger."""

    now = False

    def answer(self, future: "Future[T]", timeout: float) -> T:
        """What was answered; blocks. Raises what `Future.get` does."""
        self.now = True
        try:
            return future.get(timeout)
        finally:
            self.now = False


asking = Asking()


def told_of(future: "Future[Told]") -> Told:
    """What was answered, or why nothing was."""
    try:
        return asking.answer(future, settings.debug_command_timeout)
    except Exception as error:
        return Told(error=text_of(error))
