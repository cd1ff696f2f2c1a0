"""`error.reproduce()`: a failed call is run again in the process that called, on a copy of the actor that failed."""

import asyncio
import contextvars
import inspect
import pdb
import sys
import threading
import warnings
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from monarch_nb.debug.records import DebugError
from monarch_nb.debug.reproduce_rank import ActorAndArguments, FailedCall, Surroundings, surroundings
from monarch_nb.mesh import ActorMesh, run_on
from monarch_nb.runtime import ActorState, Runtime, current
from monarch_nb.runtime.context import Context, Instance
from monarch_nb.shape import NDSlice, Region, places_of, spans
from monarch_nb.supervision import SupervisionError
from monarch_nb.wire import ActorError, decode, error_line, type_name

_CALL = "__import__('monarch_nb.debug.reproduce_rank', fromlist=['failed_call']).failed_call(self, {call!r}, {limit})"
SKIPPED = ("monarch_nb.*", "asyncio", "asyncio.*", "contextlib", "contextvars", "threading", "selectors", "bdb", "pdb")
_NOISE = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})  # variables that differ between any two processes
_MOST_NAMES = 8  # of variables
Debugger = Callable[[], pdb.Pdb]


def stepper() -> pdb.Pdb:
    """Returns a debugger that first stops in code of the user's."""
    return pdb.Pdb(skip=SKIPPED)


def reproduce(
    runtime: Runtime,
    error: ActorError,
    *,
    rank: int | None = None,
    step: bool | Debugger = False,
    limit: int,
    timeout: float,
) -> Any:
    """See `ActorError.reproduce`; `step` may also be the debugger to be used."""
    mesh, base_rank, call = _origin(error, rank)
    state = runtime.meshes.get(mesh)
    if not isinstance(state, ActorState):
        reason = "it was no call of an actor" if state is not None else "its mesh is unknown here"
        raise DebugError(f"the call cannot be run here: {reason}")
    rank_name = f"{places_of(state.region, [base_rank]) or 'the only rank'} of {state.name}"
    failure, copy = _fetch(runtime, state, base_rank, call, rank_name, limit, timeout)
    instance = _instance(runtime, failure)
    debugger = None if not step else stepper() if step is True else step()
    token = current.set(Context(instance, failure.point))
    try:
        method = getattr(copy.actor, failure.method)
        result = _run(state.kind, partial(method, *copy.args, **copy.kwargs), debugger)
    except BdbQuit:
        return None
    except (Exception, SystemExit) as raised:
        _explain(raised, error, failure, rank_name, rank)
        raise
    finally:
        current.reset(token)
    warnings.warn(_not_again(failure, rank_name), stacklevel=_distance_to_caller())
    return result


def _origin(error: ActorError, rank: int | None) -> tuple[str, int, str]:
    if error.origin is None:
        raise DebugError("this error does not say which rank raised it")
    mesh, base_rank, call = error.origin
    if rank is None:
        return mesh, base_rank, call
    if rank not in error.base_ranks:
        raise DebugError(f"rank {rank} has not raised in this call; these have: {spans(error.base_ranks)}")
    return mesh, error.base_ranks[rank], call


def _fetch(
    runtime: Runtime, state: ActorState, rank: int, call: str, rank_name: str, limit: int, timeout: float
) -> tuple[FailedCall, ActorAndArguments]:
    """Returns the failed call, the actor and the arguments, which the rank sends between two calls. Blocks."""
    if state.stopped is not None:
        raise DebugError(f"{state.name} was stopped ({state.stopped}): the actor and the arguments went with it")
    part: ActorMesh[Any] = ActorMesh(state, Region((), NDSlice(rank, (), ())))
    reply = run_on(part, _CALL.format(call=call, limit=limit), filename="<reproduce>")
    try:
        answer = reply.get(timeout).item()
    except TimeoutError:
        raise TimeoutError(
            f"{rank_name} has not sent its actor within {timeout:g} s: it runs another call (%stacks shows which), or "
            "the state is large; reproduce(timeout=...) waits longer"
        ) from None
    except SupervisionError as lost:
        raise DebugError(
            f"{rank_name} has failed since: its state, and the arguments, which nobody else keeps, went with it. The "
            "traceback of the rank is in error.exception_formatted"
        ) from lost
    except ActorError as failed:
        raise DebugError(f"{rank_name} could not send its actor: {error_line(failed.exception)}") from failed
    if isinstance(answer, str):
        raise DebugError(f"{rank_name}: {answer}")
    failure, frames = answer
    try:
        copy = decode(frames, runtime)
    except Exception as failed:
        raise DebugError(f"the actor of {rank_name} cannot be unpickled here: {error_line(failed)}") from failed
    return failure, copy


def _instance(runtime: Runtime, failure: FailedCall) -> Instance:
    """Returns an actor instance with the rank's names, which sends messages and owns meshes as the program does."""
    root = runtime.root
    return Instance(
        runtime,
        stream=root.stream,
        lineage=(*root.lineage, failure.itself),
        rank=failure.rank,
        base_rank=failure.base_rank,
        incarnation=failure.incarnation,
        outbox=root.outbox,
        numbering=root.numbering,
    )


def _run(kind: str, method: Callable[[], Any], debugger: pdb.Pdb | None) -> Any:
    """Runs a method; methods of async actors on a thread with its own loop, as on the rank."""
    if kind != "async":
        with _traced(debugger):
            return method()
    is_coroutine = inspect.iscoroutinefunction(method)
    tasks: list[asyncio.Task[Any]] = []
    outcome: Future[Any] = Future()

    async def run() -> Any:
        tasks.extend(filter(None, [asyncio.current_task()]))
        with _traced(debugger):
            return await method() if is_coroutine else method()

    def run_in_loop() -> None:
        try:
            outcome.set_result(asyncio.run(run()))
        except BaseException as raised:
            outcome.set_exception(raised)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run_in_loop,), name="monarch-reproduce", daemon=True).start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)
        raise


@contextmanager
def _traced(debugger: pdb.Pdb | None) -> Iterator[None]:
    """A block in whose first call a debugger stops."""
    if debugger is None:
        yield
        return
    debugger.reset()
    try:
        sys.settrace(debugger.trace_dispatch)
        yield
    finally:
        debugger.quitting = True
        sys.settrace(None)


def _explain(raised: BaseException, error: ActorError, failure: FailedCall, rank_name: str, rank: int | None) -> None:
    """Adds the origin of an error to it, and the reasons why it may differ from that on the rank."""
    last: BaseException = raised
    visited = {id(last)}
    while (before := last.__cause__ or last.__context__) not in (None, error) and id(before) not in visited:
        visited.add(id(before))
        last = before
    last.__cause__ = error
    error.reproduced = raised
    remote = error.exception if rank is None else error.failures[rank]
    raised.add_note(f"This is {failure.method}() of {rank_name}, run again here.")
    if type_name(remote) != type_name(raised):
        differing = "; ".join([*differences(failure.surroundings, surroundings()), *_limits(failure)])
        raised.add_note(f"On the rank it was {error_line(remote)}. What differs here: {differing or 'nothing known'}.")
    elif failure.missing:
        raised.add_note(f"{'; '.join(_limits(failure))}.")


def _not_again(failure: FailedCall, rank_name: str) -> str:
    differing = [
        f"it ran in the program's process, not in that of {rank_name}",
        *differences(failure.surroundings, surroundings()),
        *_limits(failure),
        "the state and the arguments are as the failed call and later ones have left them",
    ]
    return f"{failure.method}() of {rank_name} did not fail again here. What differs: {'; '.join(differing)}"


def _limits(failure: FailedCall) -> Iterator[str]:
    if failure.missing:
        yield f"not brought here: {', '.join(map(str, failure.missing))}"
    yield from failure.notes


def differences(remote: Surroundings, local: Surroundings) -> list[str]:
    """Texts about the differences between two processes; of variables only the names."""
    pairs = {
        "hostname": (remote.hostname, local.hostname),
        "device": (remote.device, local.device),
        "Python": (remote.python, local.python),
        "PyTorch": (remote.torch, local.torch),
        "folder": (remote.folder, local.folder),
    }
    texts = [f"{name} {value or 'none'}, here {own or 'none'}" for name, (value, own) in pairs.items() if value != own]
    names = sorted(
        name
        for name in {*remote.environment, *local.environment} - _NOISE
        if remote.environment.get(name) != local.environment.get(name) and not name.startswith("MONARCH_NB_")
    )
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        texts.append(f"environment variables {', '.join(names[:_MOST_NAMES])}{more}")
    return texts


def _distance_to_caller() -> int:
    """Returns the number of frames from the caller to the first one outside of this library, for `warnings.warn`."""
    frame, distance = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("monarch_"):
        frame, distance = frame.f_back, distance + 1
    return distance
