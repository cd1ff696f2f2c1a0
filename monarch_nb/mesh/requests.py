"""Requests to host agents and other processes' engines: CONTROL messages that are answered.

A request to many ranks goes along a tree of agents, as a call of them does: the sender sends few messages.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import msgspec

from monarch_nb.mesh.sending import DIRECT
from monarch_nb.routing import indices, plan_cast
from monarch_nb.runtime import Future, ProcState, Runtime, fail_future, pending_future, resolve_future, when_done
from monarch_nb.transport import TransportError
from monarch_nb.wire import (
    Flags,
    Header,
    InFrame,
    Kind,
    Lane,
    Run,
    Status,
    Verb,
    decode_refusal,
    encode_body,
    in_memory,
    unfold,
    with_host_names,
)

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct, covariant=True)
T = TypeVar("T")


class RequestError(RuntimeError):
    """A host agent, or another process, refused a request; the text has the reason."""


class UnansweredError(RequestError):
    """A request will not be answered: its receiver has ended, or cannot be reached."""


class _Request(Generic[R]):
    """A pending request; its answer is handled on the reading thread."""

    def __init__(self, runtime: Runtime, dst: str, verb: Verb[Q, R]) -> None:
        self.runtime = runtime
        self.dst = dst
        self.verb = verb
        self.number = runtime.ports.open(self, dst)
        self.future: Future[R] = pending_future(describe=lambda: f"{verb.name} of {dst} has not been answered yet")

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Handles the answer."""
        self.runtime.ports.close(self.number, self.dst)
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
        """Fails the request, which will not be answered."""
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Fails the request, which will not be answered."""
        self.runtime.ports.close(self.number, self.dst)
        fail_future(self.future, UnansweredError(with_host_names(reason)))


def request(runtime: Runtime, dst: str, verb: Verb[Q, R], body: Q) -> "Future[R]":
    """Sends a request; the future gives the answer, or fails with RequestError."""
    pending = _Request(runtime, dst, verb)
    try:
        runtime.post(dst, verb, body, port=pending.number)
    except Exception as error:
        text = str(error)
        pending.fail(text if text.startswith(dst) else f"{dst} cannot be reached: {text}")
    return pending.future


def fail_requests(runtime: Runtime, dsts: Collection[str], reason: str) -> None:
    """Fails requests to processes that are lost."""
    for dst in dsts:
        for handler in runtime.ports.of(dst):
            if isinstance(handler, _Request):
                handler.fail(f"{dst} is gone: {reason}")


@overload
def gather(futures: Sequence[Future[object]], describe: Callable[[], str]) -> Future[None]: ...
@overload
def gather(futures: Sequence[Future[object]], describe: Callable[[], str], result: T) -> Future[T]: ...
def gather(futures: Sequence[Future[object]], describe: Callable[[], str], result: object = None) -> Future[object]:
    """Resolves when all futures have resolved; fails at once with the first error, if any."""
    combined: Future[object] = pending_future(describe=describe)

    def check(future: Future[object]) -> None:
        error = future.exception(0)
        if error is not None:
            fail_future(combined, error)

    for future in futures:
        when_done(future, check)
    _when_all_done(futures, lambda: resolve_future(combined, result))
    return combined


def settle(futures: Sequence[Future[object]], describe: Callable[[], str]) -> Future[None]:
    """Resolves when all futures are done, with whatever results."""
    combined: Future[None] = pending_future(describe=describe)
    _when_all_done(futures, lambda: resolve_future(combined, None))
    return combined


def _when_all_done(futures: Sequence[Future[object]], function: Callable[[], object]) -> None:
    lock = threading.Lock()
    remaining = len(futures)
    if not remaining:
        function()

    def count_down(_: Future[object]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            is_last = remaining == 0
        if is_last:
            function()

    for future in futures:
        when_done(future, count_down)


class _Answers(Generic[R]):
    """The answers to one message, by the positions of ranks in it; on the reading thread."""

    def __init__(self, runtime: Runtime, verb: Verb[Q, R], size: int, finish: Callable[[], None]) -> None:
        self.replies: dict[int, R] = {}
        self._runtime, self._verb, self._finish = runtime, verb, finish
        self._remaining = set(range(size))
        self._lock = threading.Lock()
        self.number = runtime.ports.open(self)

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Handles an answer, or several folded by a host agent."""
        try:
            if header.kind == Kind.FOLDED:
                for folded in unfold(header, parcel.frames):
                    self._take((position for span in folded.places for position in span), folded.header, folded.frames)
            else:
                self._take((header.index,), header, parcel.frames)
        finally:
            self._runtime.node.consumed(parcel)

    def _take(self, positions: Iterable[int], header: Header, frames: Sequence[InFrame]) -> None:
        answer = None
        if header.status == Status.VALUE and frames:
            answer = self._verb.decode_reply(in_memory(frames[0]))
        self._end(positions, answer)

    def lost(self, header: Header, reason: str) -> None:
        """Counts ranks that will not answer."""
        self._end((header.index,) if header.plan is None else indices(header.plan.runs), None)

    def _end(self, positions: Iterable[int], answer: R | None) -> None:
        with self._lock:
            new = self._remaining.intersection(positions)
            self._remaining -= new
            if answer is not None:
                self.replies.update(dict.fromkeys(new, answer))
            is_last = bool(new) and not self._remaining
        if is_last:
            self._finish()


def ask_ranks(
    runtime: Runtime,
    procs: ProcState,
    ranks: Sequence[int],
    verb: Verb[Q, R],
    body: Q,
    callback: Callable[[dict[int, R], set[int]], object],
    *,
    within: float,
) -> None:
    """Asks the processes of base ranks the same; calls back with the answers, by rank, and the ranks that will never
    answer, after `within` seconds at the latest. Does not block.

    A request may arrive twice: ranks without an answer at half-time are asked alone, as an agent may be stuck.
    """
    replies: dict[int, R] = {}
    lost: set[int] = set()
    once = iter((True,))

    def finish() -> None:
        if next(once, False):
            callback(replies, lost)

    def ask_each(targets: Sequence[int]) -> None:
        futures = {rank: request(runtime, procs.address(rank), verb, body) for rank in targets}

        def take(_: object = None) -> None:
            for rank, future in futures.items():
                if future.done() and future.exception(0) is None:
                    replies[rank] = future.get(0)
                elif future.done():
                    lost.add(rank)
            finish()

        when_done(settle(list(futures.values()), lambda: ""), take)
        runtime.later(within if targets is ranks else within / 2, take)

    if _are_direct(runtime, procs, ranks):
        ask_each(ranks)
        return
    rest_once = iter((True,))

    def ask_rest() -> None:
        if next(rest_once, False):
            runtime.ports.close(answers.number)
            replies.update({ranks[position]: answer for position, answer in answers.replies.items()})
            ask_each([rank for rank in ranks if rank not in replies])

    answers = _Answers(runtime, verb, len(ranks), ask_rest)
    _cast(runtime, procs, ranks, verb, body, answers)
    runtime.later(within / 2, ask_rest)


def inform_ranks(runtime: Runtime, procs: ProcState, verb: Verb[Q, object], body: Q) -> None:
    """Sends all processes of a mesh the same message, once, without an answer. Does not block, and raises nothing."""
    if not _are_direct(runtime, procs, procs.ranks):
        _cast(runtime, procs, procs.ranks, verb, body, None)
        return
    for rank in procs.ranks:
        with contextlib.suppress(TransportError):  # the process has ended, or ends
            runtime.post(procs.address(rank), verb, body)


def _cast(runtime: Runtime, procs: ProcState, ranks: Sequence[int], verb: Verb[Q, object], body: Q,
          answers: "_Answers[msgspec.Struct] | None") -> None:  # fmt: skip
    parcel = runtime.node.snapshot([encode_body(body)])
    port = 0 if answers is None else answers.number
    for agent, plan in plan_cast(procs.layout, list(_runs(procs, ranks))):
        header = Header(Kind.CAST, agent, runtime.address, method=verb.name, port=port, plan=plan,
                        flags=Flags.TO_ENGINES)  # fmt: skip
        try:
            runtime.send(header, parcel, Lane.URGENT)
        except Exception as error:
            if answers is not None:
                answers.lost(header, str(error))


def _are_direct(runtime: Runtime, procs: ProcState, ranks: Sequence[int]) -> bool:
    """Returns whether these are few ranks, which can be reached without an agent."""
    if len(ranks) < 2:
        return True
    return len(ranks) <= DIRECT and all(procs.layout.host_of(rank) in runtime.local_hosts for rank in ranks)


def _runs(procs: ProcState, ranks: Sequence[int]) -> Iterator[Run]:
    """Runs of neighbouring ranks of the same incarnation."""
    if isinstance(ranks, range) and ranks.step == 1 and not procs.incarnations:
        yield Run(ranks.start, len(ranks))
        return
    first = 0
    for end in range(1, len(ranks) + 1):
        rank, before = ranks[end] if end < len(ranks) else -1, ranks[end - 1]
        if rank != before + 1 or procs.incarnation(rank) != procs.incarnation(before):
            yield Run(ranks[first], end - first, proc_incarnation=procs.incarnation(before), index=first)
            first = end
