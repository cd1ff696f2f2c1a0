"""Sending a call: its arguments, checked and encoded, then one message to every member of a region.

It goes directly to a few local ranks, and along a tree of agents to many.
"""

import functools
import inspect
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.routing import plan_cast
from monarch_nb.runtime import (
    FILL_AGAIN_S,
    ActorState,
    AnyEndpoint,
    Context,
    Instance,
    PendingCall,
    Runtime,
    current_runtime,
)
from monarch_nb.runtime.recorder import traceparent
from monarch_nb.shape import NDSlice, Region
from monarch_nb.transport import DescriptorLimitError, raised_by_handler, uninterrupted
from monarch_nb.wire import Flags, Header, Kind, OutFrame, Run, check_size, encode, pickle_failure, text_of
from monarch_nb.wire.header import SKIP

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

DIRECT = 16  # the most ranks, all on this host, that are sent to one by one


class HeldByRanksError(TypeError):
    """An argument is a tensor whose values are in other processes, so that it cannot be pickled."""


class LentFrames(list[OutFrame]):
    """The body of a call whose arguments are in its actors' processes already; see `LentArguments`."""

    @abstractmethod
    def sending(self, call: str, pending: PendingCall[object] | None = None) -> AbstractContextManager[None]:
        """Surrounds the sending of a call, by id; then the arguments are passed, in order with their operations.

        `pending` waits for its answers.
        """


def hidden_from_callers(declared: AnyEndpoint) -> int:
    """Returns the number of first parameters that callers do not pass: the object, and the port for its replies."""
    return 2 if declared.explicit_response_port else 1


@functools.lru_cache(maxsize=1024)
def callers_signature(method: Callable[..., object], hidden: int) -> inspect.Signature:
    """Returns the signature of a method without its `hidden` first parameters."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[hidden:])


@functools.lru_cache(maxsize=1024)
def _arity(method: Callable[..., object], hidden: int) -> tuple[inspect.Signature, int, int]:
    """Returns the signature without `hidden` first parameters, and the least and most positional arguments that fit."""
    signature = callers_signature(method, hidden)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return signature, 1, 0  # never surely
    return signature, sum(p.default is p.empty for p in positional), len(positional)


def check_arguments(
    method: Callable[..., object], hidden: int, title: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raises TypeError here, at the caller, for arguments that do not fit."""
    signature, least, most = _arity(method, hidden)
    if not kwargs and least <= len(args) <= most:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{title}{signature}: {text_of(error)}") from None


def arguments_that_fit(declared: AnyEndpoint) -> range:
    """Returns the numbers of positional arguments that surely fit an endpoint."""
    _, least, most = _arity(declared.method, hidden_from_callers(declared))
    return range(least, most + 1)


def encode_arguments(
    title: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    method: Callable[..., object] | None = None,
    hidden: int = 0,
) -> list[OutFrame]:
    """Returns the body of a call. Raises TypeError with the argument that cannot be sent, and the path to its cause."""
    try:
        runtime = current_runtime()
        return encode((args, kwargs), runtime, gpu=runtime.is_worker)
    except HeldByRanksError:
        raise
    except Exception as error:
        if raised_by_handler(error):
            raise
        failure = error
    culprit = None if method is None else _unsendable(method, hidden, args, kwargs)
    if culprit is None:
        raise pickle_failure(failure, (args, kwargs), f"`arguments` of {title}")
    name, value = culprit
    raise pickle_failure(failure, value, f"argument `{name}` of {title}")


def _unsendable(
    method: Callable[..., object], hidden: int, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[str, object] | None:
    """Returns the first argument that cannot be sent by itself."""
    try:
        arguments = _arity(method, hidden)[0].bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for name, value in arguments.items():
        try:
            encode(value, current_runtime())
        except Exception:
            return name, value
    return None


def _header(
    context: Context, runtime: Runtime, actor: ActorState, method: str, port: int, call: str, region: Region
) -> Header:
    instance = context.actor_instance
    return Header(
        Kind.CALL,
        "",
        runtime.address,
        mesh=actor.uid,
        sender=instance.stream,
        method=method,
        port=port,
        extent=region.extent.key,
        call=call,
        chain=context.chain,
        flags=Flags.JUDGING if context.judging else 0,
        actor=instance.text,
        trace=traceparent(),
    )


def _each_rank(runs: Iterable[Run]) -> Iterable[tuple[int, int, int, int, int]]:
    for run in runs:
        for step in range(run.count):
            yield (
                run.rank + step * run.stride,
                run.proc_incarnation,
                run.incarnation,
                run.seq,
                run.index + step * run.index_stride,
            )


def _is_direct(runtime: Runtime, actor: ActorState, region: Region) -> bool:
    """Returns whether these are few ranks, or ranks of one process, which can be reached without an agent."""
    size = len(region)
    if size == 1:
        return True
    if size > DIRECT:
        return False
    hosts = actor.procs.layout.hosts
    if len(hosts) == 1:
        return hosts[0] in runtime.local_hosts
    return all(actor.procs.layout.host_of(rank) in runtime.local_hosts for rank in region.ranks())


def _is_local(runtime: Runtime, actor: ActorState, dst: str) -> bool:
    """Returns whether a message stays in this process; `dst` is its destination, if that is one process only."""
    if dst:
        return runtime.is_local(dst)
    return all(runtime.is_local(f"{host}/") for host in actor.procs.layout.hosts)


def send_region(
    runtime: Runtime,
    context: Context,
    actor: ActorState,
    region: Region,
    method: str,
    frames: Sequence[OutFrame],
    *,
    pending: PendingCall[object] | None = None,
    port: int = 0,
    call: str = "",
    ordered: bool = True,
    index: int | None = None,
) -> None:
    """Sends one message to each rank of `region`; the body is copied before this returns.

    Answers go to `pending`, or to `port` for a `call` that nothing here waits for.

    Blocks, interruptibly, while receivers' credits are used up. An interrupted message has reached a rank whole or not
    at all. Raises MessageTooLargeError for a body that is too large to leave this process.
    """
    header = _header(context, runtime, actor, method, port, call, region)
    if pending is not None:
        header.port, header.call, header.unread = pending.number, pending.call, pending.unread
    runs = actor.runs(region)
    if len(runs) == 1 and runs[0].count == 1:
        header.dst = actor.procs.layout.address(runs[0].rank, runs[0].proc_incarnation)
    is_local = _is_local(runtime, actor, header.dst)
    if not is_local:
        check_size(frames)
    parcel = runtime.node.snapshot(frames)
    if index is not None:  # one rank of a call that is sent piece by piece: its place is in the call, not in a slice
        header.extent = None
        runs = [msgspec.structs.replace(run, index=index) for run in runs]
    numbered: list[list[Run]] = []
    instance, outer = context.actor_instance, _sending.instance
    if outer is instance:
        if _cuts_into_another():
            ordered = False
        else:  # an interrupt has left the mark behind
            outer = None
    try:
        if ordered:
            _sending.instance = instance
            uninterrupted(_number, instance, actor, runs, numbered)
            runs = numbered[0]
        _send(runtime, actor, region, header, runs, parcel, pending)
        if pending is not None and header.dst and not is_local:
            pending.sent.append(header)
    except BaseException:
        if numbered:
            uninterrupted(_skip, runtime, actor, region, header, numbered[0])
        raise
    finally:
        _sending.instance = outer


class _Sending(threading.local):
    """The sender of the message that the thread has numbered and not yet sent to all ranks."""

    instance: Instance | None = None


_sending = _Sending()


def _cuts_into_another() -> bool:
    """Returns whether a signal's handler or a finalizer sends in the middle of another message of its thread.

    It must not be numbered: it would have to be received after the other, and its sender may wait for the answer.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not send_region.__code__:
        frame = frame.f_back
    return frame is not None


def send_each(
    runtime: Runtime,
    context: Context,
    actor: ActorState,
    ranks: Sequence[int],
    method: str,
    frames: Sequence[OutFrame],
    call: PendingCall[object],
    *,
    ordered: bool = True,
) -> None:
    """Sends one message to some ranks, one by one: they need not make a region. Closes `call` if that fails."""
    try:
        for index, rank in enumerate(ranks):
            single = Region((), NDSlice(rank, (), ()))
            send_region(runtime, context, actor, single, method, frames, pending=call, ordered=ordered, index=index)
    except BaseException:
        call.close()
        raise


def _number(instance: Instance, actor: ActorState, runs: Sequence[Run], numbered: list[list[Run]]) -> None:
    with instance.numbering:
        numbered.append(instance.outbox.number(actor.uid, runs))


def _skip(runtime: Runtime, actor: ActorState, region: Region, header: Header, runs: Sequence[Run]) -> None:
    """Fills the sequence numbers of an interrupted message; ranks that have it already drop this one."""
    header.method, header.port = SKIP, 0
    if runtime.closed:
        return
    try:
        _send(runtime, actor, region, header, runs, runtime.node.snapshot([b""]))
    except DescriptorLimitError:  # the receivers that are to skip the numbers live, and wait
        runtime.later(FILL_AGAIN_S, lambda: _skip(runtime, actor, region, header, runs))
    except Exception:  # the link itself is broken: supervision reports its failure
        return


def _send(
    runtime: Runtime,
    actor: ActorState,
    region: Region,
    header: Header,
    runs: Sequence[Run],
    parcel: "Parcel",
    pending: PendingCall[object] | None = None,
) -> None:
    if header.dst:  # one rank
        run = runs[0]
        header.rank, header.incarnation, header.seq, header.index = run.rank, run.incarnation, run.seq, run.index
        runtime.send(header, parcel)
        return
    layout = actor.procs.layout
    if _is_direct(runtime, actor, region):
        for rank, proc_incarnation, incarnation, seq, index in _each_rank(runs):
            copy = Header(
                Kind.CALL,
                layout.address(rank, proc_incarnation),
                header.src,
                header.mesh,
                rank,
                incarnation,
                header.sender,
                seq,
                header.method,
                header.port,
                index,
                header.extent,
                0,
                header.call,
                header.chain,
                actor=header.actor,
                trace=header.trace,
                unread=header.unread,
            )
            runtime.send(copy, parcel)
        return
    for dst, plan in plan_cast(layout, runs):
        copy = Header(
            Kind.CAST,
            dst,
            header.src,
            header.mesh,
            sender=header.sender,
            method=header.method,
            port=header.port,
            extent=header.extent,
            call=header.call,
            chain=header.chain,
            plan=plan,
            actor=header.actor,
            trace=header.trace,
            unread=header.unread,
        )
        if pending is not None:
            pending.sent.append(copy)
        runtime.send(copy, parcel)
