"""Cells on ranks: source that is run in processes, or inside actors between their messages."""

import ast
import importlib
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar, cast

from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.console import remember_source, run_and_draw
from monarch_nb.mesh.handle import part_of, region_of, state_of
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.sending import encode_arguments, send_region
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.runtime import EXEC, Future, MeshState, PendingCall, current, current_runtime, proc_state_of
from monarch_nb.shape import NDSlice, Region, places_of
from monarch_nb.wire import first_line, text_of

T = TypeVar("T")
R = TypeVar("R")
AnyMesh: TypeAlias = ActorMesh[Any] | ProcMesh

_FILE = "<watch>"
WITHOUT_TORCH = "PyTorch is not installed there: pip install torch"
UNDONE_S = 5.0  # for ranks to end a watch that others could not begin


def run_on(mesh: AnyMesh, source: str, *, filename: str = "<cell>") -> Future[ValueMesh[Any]]:
    """Runs a cell's source on every rank: on a ProcMesh in the lasting namespace of each process, with `rank`, `point`
    and `mesh` in it; on an ActorMesh between messages, with `self` as well. Returns the values of its last expression;
    a value that cannot be sent, or a large object with no display but a repr, stays there and is shown by its repr.

    Raises SyntaxError here, before anything is sent.
    """
    remember_source(filename, source)  # before a SyntaxError, which shows the line
    compile(source, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if isinstance(mesh, ActorMesh):
        return _run_on_actors(mesh, source, filename)
    return cast("Future[ValueMesh[Any]]", mesh._console.cell.call(source, filename, mesh))


def cell_actors(mesh: AnyMesh) -> MeshState:
    """Returns the actors in whose namespaces cells on a mesh run."""
    return state_of(mesh if isinstance(mesh, ActorMesh) else mesh._console)


def run_on_each(mesh: AnyMesh, source: str, *, filename: str = "<cell>") -> dict[int, Future[ValueMesh[Any]]]:
    """Runs a cell's source as `run_on` does, with a result of its own for each rank, by base rank."""
    return {
        rank: run_on(part_of(mesh, Region((), NDSlice(rank, (), ()))), source, filename=filename)
        for rank in region_of(mesh).ranks()
    }


def values_or_errors(futures: Mapping[int, Future[ValueMesh[T]]], seconds: float | None) -> dict[int, T | Exception]:
    """Returns the value of each rank, or the error in its place; blocks for at most `seconds` in all."""
    until = None if seconds is None else time.monotonic() + seconds
    results: dict[int, T | Exception] = {}
    for rank, future in futures.items():
        try:
            results[rank] = future.get(None if until is None else max(0.0, until - time.monotonic())).item()
        except Exception as error:
            results[rank] = error
    return results


def reason_of(error: Exception) -> str:
    """Returns the first line of a rank's error, or a note that the rank has no PyTorch."""
    text = text_of(error)
    return WITHOUT_TORCH if "No module named 'torch'" in text else first_line(text)


class RankWatch(Generic[R]):
    """A watch that runs on every rank of a mesh, on the thread that runs its endpoints.

    `name` is the full name of a class: an instance is made where the watch begins, and its method `end()` returns the
    rank's answer. `last` is the last argument of the class, as an expression that each rank evaluates, such as
    `self`.
    """

    def __init__(self, mesh: AnyMesh, name: str, *, last: str = "") -> None:
        self._last = last
        self._mesh, self._name, self._number = mesh, name, next(_numbers)
        self.state: MeshState = state_of(mesh)
        self.procs = proc_state_of(self.state)

    def begin(self, *arguments: object) -> None:
        """Begins the watch on all ranks, after their current message. Blocks until then.

        Raises RuntimeError where a watch needs PyTorch and ranks have none; else the error of a rank.
        """
        code = ", ".join([*map(repr, (self._number, self._name, *arguments)), *filter(None, [self._last])])
        answers = values_or_errors(run_on_each(self._mesh, _source("begin_watch", code), filename=_FILE), None)
        failure = next((answer for answer in answers.values() if isinstance(answer, Exception)), None)
        if failure is not None:
            values_or_errors(self._end(), UNDONE_S)
            if (reason := reason_of(failure)) == WITHOUT_TORCH:
                raise RuntimeError(reason) from None
            raise failure

    def end(self, within: float, matter: str) -> tuple[dict[int, R], list[str]]:
        """Ends the watch on all ranks. Returns answers by base rank, and notes on ranks that reported no `matter`."""
        results, notes = dict[int, R](), list[str]()
        answers: Mapping[int, R | Exception | None] = values_or_errors(self._end(), within)
        for rank, answer in answers.items():
            if isinstance(answer, Exception):
                location = places_of(self.procs.region, [rank]) or self.state.name
                notes.append(f"{location} did not say {matter}: {reason_of(answer)}")
            elif answer is not None:
                results[rank] = answer
        return results, notes

    def _end(self) -> dict[int, Future[ValueMesh[Any]]]:
        return run_on_each(self._mesh, _source("end_watch", repr(self._number)), filename=_FILE)


def _source(function: str, arguments: str) -> str:
    return f"__import__({__name__!r}, fromlist=[{function!r}]).{function}({arguments})"


_numbers = count(time.time_ns())  # different in each controller
_ends: dict[int, Callable[[], object]] = {}  # of the watches that run in this process


def begin_watch(number: int, name: str, *arguments: object) -> None:
    """Begins this rank's part of a `RankWatch`."""
    module, _, kind = name.rpartition(".")
    _ends[number] = getattr(importlib.import_module(module), kind)(*arguments).end


def end_watch(number: int) -> object:
    """Ends this rank's part of a watch, and returns its result. Raises RuntimeError if none runs."""
    if number not in _ends:
        raise RuntimeError("its process is a new one, which was not watched")
    return _ends.pop(number)()


def _run_on_actors(mesh: ActorMesh[Any], source: str, filename: str) -> Future[ValueMesh[Any]]:
    runtime = current_runtime()
    state, region = mesh._state, mesh._region
    call = PendingCall(
        runtime,
        f"{state.name}[cell]",
        state.uid,
        region.ranks,
        len(region),
        lambda replies: ValueMesh._of_thunks(region, replies, state.region),
    )
    failure = runtime.supervisor.check(state, region, call)
    if failure is not None:
        call.fail(failure)
        return call.hand_out()
    frames = encode_arguments(call.title, (source, filename, mesh), {})
    send_region(runtime, runtime.context(), state, region, EXEC, frames, pending=call)
    return call.hand_out()


def run_in_actor(obj: object, namespace: dict[str, object], source: str, filename: str, mesh: object) -> object:
    """Runs a cell inside an actor, between its messages."""
    context = current.get()
    assert context is not None
    point = context.actor_instance.rank
    namespace.update(self=obj, rank=point.rank, point=point, mesh=mesh)
    return run_and_draw(source, filename, namespace)
