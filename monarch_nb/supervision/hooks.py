"""Hooks of actors that supervision runs: on the actor's own thread, before its next message."""

import inspect
import logging
from collections.abc import Awaitable, Callable

import msgspec

from monarch_nb.runtime import ActorCell
from monarch_nb.supervision.failure import MeshFailure

logger = logging.getLogger(__name__)


class UndeliverableMessage(msgspec.Struct, frozen=True):
    """A message that did not arrive: the argument of `_handle_undeliverable_message`."""

    source: str  # its sender
    destination: str  # address of the receiving process
    mesh: str
    method: str  # "" for a value sent to a port
    reason: str

    def sender(self) -> str:
        """The sender."""
        return self.source

    def dest(self) -> str:
        """The destination: a process, and the endpoint there if any."""
        return f"{self.destination}.{self.method}" if self.method else self.destination

    def error_msg(self) -> str:
        """The reason why it did not arrive."""
        return self.reason


def run_hook(
    cell: ActorCell,
    hook: Callable[[], object],
    done: Callable[[bool], None],
    failed: Callable[[BaseException], None],
    *,
    judging: bool = False,
) -> None:
    """Has an actor run a hook, and calls `done` with its bool. Thread-safe; does not block.

    All exceptions count, CancelledError and SystemExit too, so that the failure is always reported: unless the actor
    ends, of which its owner is notified anyway. An actor that is already ending runs no such hook.
    """

    def run() -> object:
        if cell.cause is not None:
            return None
        try:
            with cell.acting(judging=judging):
                result = hook()
            if inspect.iscoroutine(result):
                return finish(result)
            done(bool(result))
        except BaseException as error:
            raised(error)
        return None

    async def finish(result: Awaitable[object]) -> None:
        try:
            with cell.acting(judging=judging):
                handled = bool(await result)
            done(handled)
        except BaseException as error:
            raised(error)

    def raised(error: BaseException) -> None:
        if cell.ending and not isinstance(error, Exception):
            raise error
        failed(error)

    cell.executor.post_control(run)


def log_failure(failure: MeshFailure) -> None:
    """Logs an unhandled failure: the default."""
    logger.error("%s", failure.report())
