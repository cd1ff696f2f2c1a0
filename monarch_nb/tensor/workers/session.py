"""One stream of commands in one worker: it runs them in order, on the tensors that came of earlier ones."""

import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from monarch_nb.tensor.commands import (
    FREE,
    NUMBER,
    OBJECT,
    REPLAY,
    SHARDS,
    WHOLE,
    Define,
    Making,
    Number,
    Parts,
    Put,
    Run,
    TensorOf,
)
from monarch_nb.tensor.compiled.program import Trace
from monarch_nb.tensor.compiled.replay import Replay
from monarch_nb.tensor.errors import Failure
from monarch_nb.tensor.propagation import carrier
from monarch_nb.tensor.workers.lost import Lost, LostInputError
from monarch_nb.tensor.workers.making import made_in_parts
from monarch_nb.tensor.workers.plans import Env, Executable, Told
from monarch_nb.wire import format_exception

_ASKING = frozenset({WHOLE, NUMBER, SHARDS})


class Session:
    """Takes batches; `rank` is this process's place in the mesh."""

    def __init__(self, mesh: DeviceMesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self.env: Env = {}
        self._plans: dict[Number, Executable | Unusable] = {}
        self._failures: list[Failure] = []
        self._number = 0  # of the operation that runs

    def run(self, first: int, numbers: Sequence[Number], objects: Sequence[Any]) -> tuple[list[Failure], list[Any]]:
        """Runs a batch, whose first command is the stream's `first`; gives the failures, and what was asked for."""
        self._number = first - 1
        self._failures = []
        values: list[Any] = []
        waiting = deque(objects)
        at, end = 0, len(numbers)
        env, plans = self.env, self._plans
        with torch.no_grad():
            while at < end:
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
                if code in _ASKING:
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
        return self._failures, values

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
        carried = carrier(tensor.dtype)
        whole: Any = tensor
        if not all(one.is_replicate() for one in tensor.placements):
            whole = tensor if carried is None else tensor.to(carried)
            whole = whole.redistribute(self._mesh, [Replicate()] * self._mesh.ndim)
        if self._rank:
            return None
        local = whole.to_local().to(tensor.dtype)
        return local.item() if code == NUMBER else local.cpu()

    # -- what is no operation ---------------------------------------------------------------------------------------

    def _object(self, command: Any, values: list[Any]) -> None:
        try:
            value = self._do(command)
        except BaseException as error:
            value = failure = self._failure(type(command).__name__.lower(), error)
            if isinstance(command, Put | Parts):
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
                self._plans[command.number] = Executable(command, self.env, self._mesh)
            case Put():
                tensor = command.tensor.to(self._mesh.device_type)
                self.env[command.result] = distribute_tensor(tensor, self._mesh, command.placements, src_data_rank=None)
            case Parts():
                self.env[command.result] = made_in_parts(command, self._mesh)
            case Trace():
                self.env[command.number] = Replay(command, self._mesh)
            case Run():
                args = [self._local(value) for value in command.args]
                kwargs = {name: self._local(value) for name, value in command.kwargs.items()}
                with torch.enable_grad():
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
        first = self._number

        def failed(operation: int, name: str, error: BaseException) -> Failure:
            self._number = first + operation
            return self._failure(name, error)

        replay = self.env[program]
        if isinstance(replay, Lost):
            self.env.update(dict.fromkeys(numbers[middle:end], replay))
        else:
            replay.run(self.env, numbers[begin:middle], numbers[middle:end], seed, failed)
        self._number = first + operations - 1
        return end

    # -- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, plan: Told, command: Sequence[Number], error: BaseException) -> None:
        tensors = command[plan.tensors]
        before = (self.env.get(number) for number in tensors)
        lost = next((value.failure for value in before if isinstance(value, Lost)), None)
        gone = Lost(lost if lost is not None else self._failure(plan.operation, error))
        for number in (*command[plan.results], *(tensors[place] for place in plan.writes)):
            self.env[number] = gone

    def _failure(self, operation: str, error: BaseException) -> Failure:
        if isinstance(error, LostInputError):
            return error.failure
        told = format_exception(error) if operation == "run" else traceback.format_exception_only(error)
        story = "".join(told)
        failure = Failure(self._number, operation, self._rank, type(error).__name__, str(error), story)
        self._failures.append(failure)
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
