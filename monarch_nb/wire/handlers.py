"""The handlers of engine messages in a process."""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from monarch_nb.wire.body import Frame
from monarch_nb.wire.header import Header, Status
from monarch_nb.wire.texts import text_of
from monarch_nb.wire.verb import Lane, MalformedMessageError, Refused, Verb

logger = logging.getLogger(__name__)

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")
Answer = Callable[[Header, Status, msgspec.Struct, Lane], None]


class VerbTakenError(ValueError):
    """A verb has a handler in this process already."""


class Asker(Generic[R]):
    """The sender of a request, which is answered from any thread: now or later, once or not at all."""

    __slots__ = ("_answer", "header", "lane")

    def __init__(self, header: Header, answer: Answer) -> None:
        self.header = header
        self.lane = Lane.URGENT  # of the reply: that of the verb
        self._answer = answer

    @property
    def src(self) -> str:
        """The address of the process that asks."""
        return self.header.src

    @property
    def waits(self) -> bool:
        """True if an answer is awaited."""
        return self.header.port != 0

    def reply(self, reply: R) -> None:
        """Answers the request, if an answer is awaited."""
        if self.header.port and isinstance(reply, msgspec.Struct):
            self._answer(self.header, Status.VALUE, reply, self.lane)

    def refuse(self, reason: str) -> None:
        """Reports why the request is not carried out, if an answer is awaited."""
        if self.header.port:
            self._answer(self.header, Status.EXCEPTION, Refused(reason), self.lane)


Handler = Callable[[Q, Asker[R]], R | None]
_Handled = tuple[Verb[Any, Any], Handler[Any, Any]]


class Handlers:
    """The verbs that one process handles. `owner` is its name in refusals: "host agents", "processes"."""

    def __init__(self, owner: str, answer: Answer) -> None:
        self._owner = owner
        self._answer = answer
        self._handlers: dict[str, _Handled] = {}
        self.closed = False  # further errors result from leaving, and are not logged

    def handle(self, verb: Verb[Q, R], function: Handler[Q, R]) -> None:
        """Handles a verb by `function(request, asker)`, which is called on the reading thread and must not block.

        Its result is the reply; with None the request has been, or will be, answered by `asker.reply`.
        Raises VerbTakenError if the verb has a handler.
        """
        entry = (verb, function)
        if self._handlers.setdefault(verb.name, entry) is not entry:
            raise VerbTakenError(
                f"{verb.name} has a handler already, {self._handlers[verb.name][1]!r}: release it first"
            )

    def release(self, verb: Verb[Q, R]) -> None:
        """Removes the handler of a verb."""
        self._handlers.pop(verb.name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._handlers

    def take(self, header: Header, body: Frame) -> None:
        """Passes one message to its handler. Raises nothing: errors are logged, and sent to the requester."""
        asker: Asker[object] = Asker(header, self._answer)
        try:
            entry = self._handlers.get(header.method)
            if entry is None:
                asker.refuse(f"{self._owner} know no {header.method!r}")
                return
            verb, function = entry
            asker.lane = verb.lane
            reply = function(verb.decode(body), asker)
            if reply is not None:
                asker.reply(reply)
        except Exception as error:
            self._failed(header, asker, error)

    def _failed(self, header: Header, asker: Asker[object], error: Exception) -> None:
        if self.closed:
            return
        if isinstance(error, MalformedMessageError):
            logger.warning("a message from %s was not understood: %s", header.src, error)
        else:
            logger.error("%s from %s", header.method, header.src, exc_info=error)
        try:
            asker.refuse(f"{type(error).__name__}: {text_of(error)}")
        except Exception:
            logger.debug("no reply could be sent to %s", header.src, exc_info=True)
