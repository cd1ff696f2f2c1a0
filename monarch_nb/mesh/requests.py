"""Requests to host agents and other processes' engines: CONTROL messages that are answered."""

import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from monarch_nb.runtime import Future, Runtime, fail_future, pending_future, resolve_future, when_done
from monarch_nb.wire import Header, Status, Verb, decode_refusal

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class RequestError(RuntimeError):
    """A host agent, or another process, refused a request; the text says why."""


class UnansweredError(RequestError):
    """Nobody will answer a request: whoever was asked is gone, or cannot be reached."""


class _Request(Generic[R]):
    """One answer, on the reading thread."""

    def __init__(self, engine: Runtime, dst: str, verb: Verb[Any, R]) -> None:
        self.engine = engine
        self.dst = dst
        self.verb = verb
        self.number = engine.ports.open(self, dst)
        self.future: Future[R] = pending_future(story=lambda: f"{verb.name} of {dst} has not been answered yet")

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """The answer."""
        self.engine.ports.close(self.number, self.dst)
        body = parcel.frames[0] if parcel.frames else b""
        try:
            if header.status != Status.VALUE:
                raise RequestError(decode_refusal(body))
            answer = self.verb.decode_reply(body)
        except Exception as error:
            fail_future(self.future, error)
        else:
            resolve_future(self.future, answer)

    def lost(self, header: Header, reason: str) -> None:
        """It will not be answered."""
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """It will not be answered."""
        self.engine.ports.close(self.number, self.dst)
        fail_future(self.future, UnansweredError(reason))


def request(engine: Runtime, dst: str, verb: Verb[Q, R], body: Q) -> "Future[R]":
    """Sends a request; the future gives the answer, or fails with RequestError."""
    asked = _Request(engine, dst, verb)
    try:
        engine.tell(dst, verb, body, port=asked.number)
    except Exception as error:
        asked.fail(f"{dst} cannot be reached: {error}")
    return asked.future


def fail_requests(engine: Runtime, dsts: Collection[str], reason: str) -> None:
    """Those who should answer are gone: whoever waits for them is told."""
    for dst in dsts:
        for handler in engine.ports.of(dst):
            if isinstance(handler, _Request):
                handler.fail(f"{dst} is gone: {reason}")


def gather(futures: "list[Future[Any]]", story: Callable[[], str], result: Any = None) -> Future[Any]:
    """Resolves when all have; with the first error, if any, as soon as it is there."""
    whole: Future[Any] = pending_future(story=story)

    def look(future: Future[Any]) -> None:
        error = future.exception(0)
        if error is not None:
            fail_future(whole, error)

    for future in futures:
        when_done(future, look)
    _when_all_are_over(futures, lambda: resolve_future(whole, result))
    return whole


def settle(futures: "list[Future[Any]]", story: Callable[[], str]) -> Future[None]:
    """Resolves when all are over, whatever came of them."""
    whole: Future[None] = pending_future(story=story)
    _when_all_are_over(futures, lambda: resolve_future(whole, None))
    return whole


def _when_all_are_over(futures: "list[Future[Any]]", function: Callable[[], object]) -> None:
    lock = threading.Lock()
    left = len(futures)
    if not left:
        function()

    def one(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            function()

    for future in futures:
        when_done(future, one)
