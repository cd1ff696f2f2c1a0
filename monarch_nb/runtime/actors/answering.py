"""How what an actor's endpoint gives, or raises, comes to its caller."""

import asyncio
import logging
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime.actors.cell_host import CellHost
from monarch_nb.runtime.actors.life import ActorLife
from monarch_nb.runtime.cancelled import not_run
from monarch_nb.runtime.context import StopRequested
from monarch_nb.wire import (
    Header,
    RemoteException,
    Status,
    encode,
    encode_exception,
    error_line,
    format_exception,
    pickle_failure,
    text_of,
    type_name,
)

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)


class AnsweringActor(ActorLife):
    """Answers messages. On the actor's own thread."""

    process: CellHost
    endpoints: dict[str, Any]
    errors: int  # messages that raised

    def _explicit(self, header: Header) -> bool:
        endpoint = self.endpoints.get(header.method)
        return endpoint is not None and endpoint._explicit_response_port

    def _answer(self, header: Header, result: Any) -> None:
        if header.port == 0 or self._explicit(header):
            return
        try:
            frames = encode(result, self.process)
            self.process.bound(header.src, frames)
        except Exception as error:
            told = pickle_failure(error, result, f"the `result` of {self.spec.name}.{header.method}")
            self._reply(header, Status.EXCEPTION, encode_exception(told))
            return
        self._reply(header, Status.VALUE, frames)

    def _raised(self, header: Header, error: BaseException) -> None:
        if isinstance(error, StopRequested):
            self._refuse_current(header)
            return
        if isinstance(error, SystemExit) and error.code in (None, 0):  # a program's good end
            self._answer(header, None)
            return
        self.errors += 1
        kept = None
        try:
            kept = self.process.failures.keep(self.instance, header, error)
            self._tell_raised(header, error)
        except BaseException as failure:
            self._untellable(header, error, failure)
        if kept is not None:
            try:
                self.process.failures.ease(kept)
            except BaseException:  # of what the frames hold; the caller has been answered
                logger.exception("what a failure of %s holds could not be let go", self.instance)

    def _untellable(self, header: Header, error: BaseException, failure: BaseException) -> None:
        """What was raised could not be told as it is, or an interrupt broke that off: it is told in words."""
        story, why = "".join(format_exception(error)), f"{error_line(failure)} was raised when it was told"
        told = RemoteException(type_name(error), text_of(error), story, why)
        if header.port and not self._explicit(header):
            self._reply(header, Status.EXCEPTION, encode_exception(told))
        elif self.cause is None:
            self.fail("exception", told, header)

    def _tell_raised(self, header: Header, error: BaseException) -> None:
        interrupted = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        # `sys.exit(2)`, as argparse does, ends a program; here that program is the call.
        ordinary = isinstance(error, (Exception, SystemExit)) or (interrupted and not self.ending)
        given_up = isinstance(error, (asyncio.CancelledError, CancelledError))
        cancelled = given_up and header.call in self.process.cancelled
        if ordinary and header.port and (cancelled or not self._explicit(header)):
            self._reply(header, Status.EXCEPTION, encode_exception(error))
            return
        if interrupted and self.ending:
            self._refuse_current(header)
            return
        self.fail("exception", error, header)

    def _refuse_current(self, header: Header) -> None:
        if header.port and not self._explicit(header):
            self._refuse(header)

    def _drop(self, header: Header, parcel: "Parcel") -> None:
        self.process.node.consumed(parcel)
        self._reply(header, Status.EXCEPTION, encode_exception(not_run()))
