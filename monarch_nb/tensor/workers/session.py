"""One stream of commands in one worker: it runs them in order, on the tensors that came of earlier ones."""

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from monarch_nb.tensor.commands import (
    FREE,
    NUMBER,
    OBJECT,
    REPLAY,
    SHARDS,
    WHOLE,
    Cell,
    Define,
    Locals,
    Making,
    Number,
    Parts,
    Put,
    Revive,
    Run,
    TensorOf,
)
from monarch_nb.tensor.compiled.program import Trace
from monarch_nb.tensor.compiled.replay import Replay
from monarch_nb.tensor.failure import Failure
from monarch_nb.tensor.groups.member import Membership
from monarch_nb.tensor.propagation import whole
from monarch_nb.tensor.verbs import Used
from monarch_nb.tensor.workers.lost import Lost, LostInputError
from monarch_nb.tensor.workers.making import empty, held, made_in_parts
from monarch_nb.tensor.workers.plans import Env, Executable, Told
from monarch_nb.tensor.workers.randomness import BORROWED
from monarch_nb.tensor.workers.usage import Stopwatch, usage
from monarch_nb.wire import format_exception

ASKING = frozenset({WHOLE, NUMBER, SHARDS})
KEPT = 8192  # operations; a rank cannot be further ahead of another than the controller lets any run ahead of it


class HaltedError(Exception):
    """Ends a compiled step of which nothing more is to be run."""


class Tensors(Env):
    """Those of a stream. One that is not there was on a process that is gone, and this one is in its place."""

    def __missing__(self, number: Number) -> Lost:
        return Lost(Failure(0, "heal_mesh", 0, "ContentsLostError", "a process that held a shard of it is gone", ""))


class Journal:
    """The batches of one stream. `plans` are those that it uses."""

    def __init__(self, plans: Mapping[Number, Told]) -> None:
        self._plans = plans
        self._steps: deque[tuple[int, int, Sequence[Number], Sequence[Number]]] = deque()
        self._batches: deque[tuple[int, Sequence[Number], tuple[Number | None, ...]]] = deque()

    def note(self, first: int, numbers: Sequence[Number], objects: Sequence[Any]) -> None:
        """A batch begins with operation `first`."""
        self._batches.append((first, numbers, tuple(getattr(one, "result", None) for one in objects)))
        while self._batches[0][0] < first - KEPT:
            self._batches.popleft()

    def replayed(self, first: int, count: int, made: Sequence[Number], written: Sequence[Number]) -> None:
        """A compiled step of so many operations has begun, or was passed over."""
        self._steps.append((first, first + count, made, written))
        while self._steps[0][0] < first - KEPT:
            self._steps.popleft()

    def touched(self, start: int, stop: int) -> tuple[set[Number], set[Number]]:
        """Tensors that operations from `start` up to `stop` make, and those they write to, but for what is freed."""
        made: set[Number] = set()
        written: set[Number] = set()
        freed: set[Number] = set()
        for number, results, targets in self._operations():
            if number is None:
                freed.update(results)
            elif start <= number < stop:
                made.update(results)
                written.update(targets)
        for begin, end, results, targets in self._steps:
            if begin < stop and start < end:  # all of it, since nobody knows how far it came
                made.update(results)
                written.update(targets)
        return made - freed, written - freed

    def _operations(self) -> Iterator[tuple[int | None, Sequence[Number], Sequence[Number]]]:
        """Number of each operation, what it makes and what it writes to; None with what is freed."""
        for first, numbers, made in self._batches:
            number, at, objects = first - 1, 0, iter(made)
            while at < len(numbers):
                code = numbers[at]
                if code == FREE:
                    yield None, numbers[at + 1 : at + 2], ()
                    at += 2
                    continue
                number += 1
                if code == OBJECT:
                    result = next(objects)
                    yield number, () if result is None else (result,), ()
                    at += 1
                elif code in ASKING:
                    at += 2
                elif code == REPLAY:
                    _, operations, inputs, outputs = map(int, numbers[at + 1 : at + 5])
                    number += operations - 1
                    at += 6 + inputs + outputs
                else:
                    plan = self._plans[code]
                    tensors = numbers[at + plan.tensors.start : at + plan.tensors.stop]
                    results = numbers[at + plan.results.start : at + plan.results.stop]
                    yield number, results, [tensors[place] for place in plan.writes]
                    at += plan.length


class Session:
    """Takes batches; `ranks` are the members of its mesh, `rank` is this process's place among them.

    Interrupts hit functions of the program, which run `interruptible`, and nothing else: no rank is to stop at an
    operation that others go through.
    """

    def __init__(
        self,
        stream: int,
        mesh: DeviceMesh,
        ranks: tuple[int, ...],
        rank: int,
        member: Membership,
        interruptible: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stream, self._mesh, self._ranks, self._rank, self._member = stream, mesh, ranks, rank, member
        self._interruptible = interruptible
        self.env: Env = Tensors()
        self._plans: dict[Number, Executable | Unusable] = {}
        self._journal = Journal(self._plans)
        self._failures: list[Failure] = []
        self._number = -1  # of the operation that runs, or ran last
        self._begun: int | None = None  # the first operation of the compiled step that runs
        self._runs = False
        self._stopwatch = Stopwatch()
        self._halted: Failure | None = None  # nothing is run any more in this generation, for this
        self._reached = (0, 0)  # the operations that were done, and that were begun, when it halted

    @property
    def done(self) -> int:
        """How many operations it has done. From any thread."""
        return self._number if self._runs else self._number + 1

    def usage(self) -> Used:
        """What its tensors take here. From any thread."""
        return usage(list(self.env.values()), self._stopwatch, self._mesh.device_type)

    @property
    def reached(self) -> tuple[int, int]:
        """How many operations it has done, and how many it has begun."""
        return self._reached if self._halted is not None else (self._number + 1, self._number + 1)

    @property
    def is_halted(self) -> bool:
        """Whether commands are only gone through, because this generation of its group is over."""
        return self._halted is not None

    def run(self, first: int, numbers: Sequence[Number], objects: Sequence[Any]) -> tuple[list[Failure], list[Any]]:
        """Runs a batch, whose first command is the stream's `first`; gives the failures, and what was asked for."""
        self._number, self._failures, self._runs = first - 1, [], True
        self._journal.note(first, numbers, objects)
        values: list[Any] = []
        try:
            if self._halted is None and self._member.over is not None:
                self._halt(self._told_by_others(), (first, first))
            waiting = deque(objects)
            at = self._execute(numbers, waiting, values)
            if self._halted is not None:
                self._go_through(numbers, at, waiting, values)
        finally:
            self._runs = False
            BORROWED.give_back()
        return self._failures, values

    def _execute(self, numbers: Sequence[Number], waiting: deque[Any], values: list[Any]) -> int:
        """Runs commands; gives where it stopped."""
        at, end = 0, len(numbers)
        env, plans = self.env, self._plans
        with torch.no_grad():
            while at < end and self._halted is None:
                code = numbers[at]
                if code == FREE:
                    env.pop(numbers[at + 1], None)
                    at += 2
                    continue
                self._number += 1
                if code == OBJECT:
                    at += 1
                    self._object(waiting.popleft(), values)
                    continue
                if code in ASKING:
                    self._asked(code, numbers[at + 1], values)
                    at += 2
                    continue
                if code == REPLAY:
                    at = self._replay(numbers, at + 1)
                    continue
                plan = plans[code]
                command = numbers[at : at + plan.length]
                try:
                    plan.run(command)
                except BaseException as error:
                    self._failed(plan, command, error)
                at += plan.length
        return at

    # -- when the group is over -------------------------------------------------------------------------------------

    def _halt(self, failure: Failure, reached: tuple[int, int]) -> None:
        self._halted, self._reached = failure, reached

    def _go_through(self, numbers: Sequence[Number], at: int, waiting: deque[Any], values: list[Any]) -> None:
        """Runs nothing, as a program that has raised an error runs nothing of what follows; keeps count and plans."""
        halted = self._halted
        assert halted is not None
        gone = Lost(halted)
        while at < len(numbers):
            code = numbers[at]
            if code == FREE:
                self.env.pop(numbers[at + 1], None)
                at += 2
                continue
            self._number += 1
            if code == OBJECT:
                at += 1
                command = waiting.popleft()
                if isinstance(command, Define | Making):
                    self._object(command, values)
                elif isinstance(command, Put | Locals | Parts):
                    self.env[command.result] = gone
                elif isinstance(command, Trace):
                    self._object(command, values)
                elif isinstance(command, Run):
                    values.append(halted)
            elif code in ASKING:
                values.append(halted)
                at += 2
            elif code == REPLAY:
                at = self._pass_over(numbers, at + 1, gone)
            else:
                plan = self._plans[code]
                for number in numbers[at : at + plan.length][plan.results]:
                    self.env[number] = gone
                at += plan.length

    def resume(self, start: int, stop: int) -> None:
        """Goes on in the next generation.

        All ranks have done the operations before `start`, and none has begun those from `stop` on: what is between is
        not the same on all, so that what it made and wrote to is lost.
        """
        made, written = self._journal.touched(start, stop)
        gone = Lost(self._halted or self._told_by_others())
        for number in made | {number for number in written if number in self.env}:
            self.env[number] = gone
        self._halted = None

    def _told_by_others(self) -> Failure:
        over = self._member.over
        if over is not None and over.failures:
            return over.failures[0]
        reason = over.reason if over is not None else "the mesh was grouped anew"
        return Failure(self._number, "", self._rank, "DeviceMeshError", reason, "", self._stream)

    def tensor(self, number: Number) -> Any:
        """A tensor by its number. Raises LostInputError for one that could not be made."""
        value = self.env[number]
        if isinstance(value, Lost):
            raise LostInputError(value.failure)
        return value

    # -- what is asked for ------------------------------------------------------------------------------------------

    def _asked(self, code: Number, number: Number, values: list[Any]) -> None:
        try:
            values.append(self._answer(code, self.tensor(number)))
        except BaseException as error:
            values.append(self._failure("full_tensor" if code != SHARDS else "local_shards", error))

    def _answer(self, code: Number, tensor: DTensor) -> Any:
        if code == SHARDS:
            return tensor.to_local().cpu()
        local = whole(tensor)
        if self._rank:
            return None
        return local.item() if code == NUMBER else local.cpu()

    # -- what is no operation ---------------------------------------------------------------------------------------

    def _object(self, command: Any, values: list[Any]) -> None:
        try:
            value = self._do(command)
        except BaseException as error:
            value = failure = self._failure(type(command).__name__.lower(), error)
            if isinstance(command, Put | Locals | Parts):
                self.env[command.result] = Lost(failure)
            elif isinstance(command, Trace):
                self.env[command.number] = Lost(failure)
            elif isinstance(command, Define | Making):
                self._plans[command.number] = Unusable(command, failure)
        if isinstance(command, Run):
            values.append(value)

    def _do(self, command: Any) -> Any:
        match command:
            case Define() | Making():
                self._plans[command.number] = Executable(command, self.env, self._mesh, self._stopwatch)
            case Put():
                tensor = command.tensor.to(self._mesh.device_type)
                self.env[command.result] = distribute_tensor(tensor, self._mesh, command.placements, src_data_rank=None)
            case Locals():
                self.env[command.result] = held(command.tensors[self._rank], command.made, self._mesh)
            case Parts():
                BORROWED.give_back()
                with self._interruptible():
                    self.env[command.result] = made_in_parts(command, self._mesh)
            case Cell():
                self._stopwatch.begin(command.number)
            case Revive():
                if isinstance(self.env[command.result], Lost):
                    self.env[command.result] = empty(command.made, self._mesh)
            case Trace():
                self.env[command.number] = Replay(command, self._mesh, self._stopwatch)
            case Run():
                BORROWED.give_back()
                args = [self._local(value) for value in command.args]
                kwargs = {name: self._local(value) for name, value in command.kwargs.items()}
                with torch.enable_grad(), self._interruptible():
                    return _off_device(command.function(*args, **kwargs))
        return None

    def _local(self, value: Any) -> Any:
        if isinstance(value, TensorOf):
            tensor = self.tensor(value.number)
            return tensor if value.sharded else tensor.to_local()
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._local, value))
        if isinstance(value, dict):
            return {key: self._local(one) for key, one in value.items()}
        return value

    # -- compiled steps ---------------------------------------------------------------------------------------------

    def _replay(self, numbers: Sequence[Number], at: int) -> int:
        """Runs a compiled step; gives where the next command begins. It counts as all its operations."""
        program, operations, inputs, outputs, seed = map(int, numbers[at : at + 5])
        begin, middle, end = at + 5, at + 5 + inputs, at + 5 + inputs + outputs
        first = self._begun = self._number

        def failed(operation: int, name: str, error: BaseException) -> Failure:
            self._number = first + operation
            failure = self._failure(name, error)
            if self._halted is not None:
                raise HaltedError
            return failure

        replay = self.env[program]
        if isinstance(replay, Lost):
            self.env.update(dict.fromkeys(numbers[middle:end], replay))
        else:
            changed = replay.written(numbers[begin:middle])
            self._journal.replayed(first, operations, numbers[middle:end], changed)
            try:
                replay.run(self.env, numbers[begin:middle], numbers[middle:end], seed, failed)
            except HaltedError:
                assert self._halted is not None
                self.env.update(dict.fromkeys((*numbers[middle:end], *changed), Lost(self._halted)))
                self._reached = (first, first + operations)
        self._begun = None
        self._number = first + operations - 1
        return end

    def _pass_over(self, numbers: Sequence[Number], at: int, gone: Lost) -> int:
        """A compiled step that is not run any more."""
        program, operations, inputs, outputs = map(int, numbers[at : at + 4])
        middle = at + 5 + inputs
        replay, made = self.env[program], numbers[middle : middle + outputs]
        changed = [] if isinstance(replay, Lost) else replay.written(numbers[at + 5 : middle])
        self._journal.replayed(self._number, operations, made, changed)
        self.env.update(dict.fromkeys(made, gone))
        self._number += operations - 1
        return middle + outputs

    # -- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, plan: Told, command: Sequence[Number], error: BaseException) -> None:
        """What an operation has made is lost. One that could not begin has left alone what it was to change."""
        tensors = command[plan.tensors]
        before = (self.env[number] for number in tensors)
        gone = next((value for value in before if isinstance(value, Lost)), None)
        changed = command[plan.results]
        if gone is None:
            gone = Lost(self._failure(plan.operation, error))
            if not isinstance(error, LostInputError):
                changed = (*changed, *(tensors[place] for place in plan.writes))
        for number in changed:
            self.env[number] = gone

    def _failure(self, operation: str, error: BaseException) -> Failure:
        """The error as it is told. If other ranks have not failed alike, nothing more is run in this generation."""
        if isinstance(error, LostInputError):
            return error.failure
        told = format_exception(error) if operation == "run" else traceback.format_exception_only(error)
        failure = Failure(
            self._number, operation, self._rank, type(error).__name__, str(error), "".join(told), self._stream
        )
        if self._member.over is None and self._member.all_failed(failure, self._ranks, self._begun):
            self._failures.append(failure)
            return failure
        over = self._member.over
        if over is not None and any(
            (one.stream, one.number, one.rank) == (self._stream, self._number, self._rank) for one in over.failures
        ):
            self._failures.append(failure)
        else:  # it comes of what has ended the generation
            failure = self._told_by_others()
        if self._halted is None:
            self._halt(failure, (self._number, self._number + 1))
        return failure


class Unusable(Told):
    """A plan that this worker could not take: whoever runs it gets the reason."""

    def __init__(self, told: Define | Making, failure: Failure) -> None:
        super().__init__(told)
        self._why = failure

    def run(self, command: Sequence[Number]) -> None:
        """Raises LostInputError, always."""
        raise LostInputError(self._why)


def _off_device(value: Any) -> Any:
    """Results as they can travel: shards of what is spread over the mesh, on the CPU."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_off_device, value))
    if isinstance(value, dict):
        return {key: _off_device(one) for key, one in value.items()}
    return value
