"""Runs the commands of one stream in one worker, in order."""

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from monarch_nb.tensor.commands import (
    FREE,
    NUMBER,
    OBJECT,
    OWN,
    REPLAY,
    SHARDS,
    Await,
    CallRemote,
    Cell,
    Define,
    DrawFrom,
    FunctionCommand,
    Locals,
    MakeParts,
    Making,
    Name,
    Number,
    PutTensor,
    Revive,
    RunFunction,
    Send,
    Take,
    Turn,
)
from monarch_nb.tensor.compiled.program import Trace
from monarch_nb.tensor.compiled.replay import Replay
from monarch_nb.tensor.groups.world import Membership
from monarch_nb.tensor.propagation import whole
from monarch_nb.tensor.replicas import StreamContents, receive, send
from monarch_nb.tensor.seeds import BORROWED, THREAD, Generators, drawn_by_function
from monarch_nb.tensor.verbs import Failure, LostInputError, LostTensor, MemoryUsed
from monarch_nb.tensor.workers.calls import detach, fill_in, function_at, off_device, sendable, sizes_kept, to_returned
from monarch_nb.tensor.workers.handover import StreamOrder, Transit, withdraw
from monarch_nb.tensor.workers.plans import (
    REQUESTS,
    BatchJournal,
    DifferentShapesError,
    Env,
    Executable,
    PlanSignature,
    TensorEnv,
    Unusable,
    distributed,
    empty,
    layout_of,
    make_in_parts,
    own,
    wrap_shard,
)
from monarch_nb.tensor.workers.usage import Stopwatch, device_settles, held_if_full, mark_on_device, usage
from monarch_nb.wire import format_exception


class HaltedError(Exception):
    """Aborts a compiled step after a halt."""


class WorkerSession:
    """Executes batches on member `rank` of a mesh of `ranks`; `envs` returns the tensors of all sessions of a process.

    Only functions of the program, which run in `interruptible`, can be interrupted: a rank must not stop at an
    operation that others complete. A session that is not `is_whole` has yet to receive its tensors from other ranks.
    Where streams run at the same time, it waits for others in `order`. `connect` makes the groups of the mesh unless it
    has them.
    """

    def __init__(
        self,
        stream: int,
        mesh: DeviceMesh,
        ranks: tuple[int, ...],
        rank: int,
        member: Membership,
        interruptible: Callable[[], AbstractContextManager[None]],
        transit: Transit,
        envs: Callable[[], Iterable[Env]],
        order: StreamOrder,
        connect: Callable[[], None],
        generators: Generators,
        *,
        is_whole: bool = True,
    ) -> None:
        self._stream, self._mesh, self._ranks, self._rank, self._member = stream, mesh, ranks, rank, member
        self._interruptible, self._transit, self._envs = interruptible, transit, envs
        self._order, self._connect, self._generators = order, connect, generators
        self._turn_done = 0  # operations done when its turn, which may wait for others, last began or ended
        self.is_whole = is_whole  # True if this process has the tensors of the stream
        self.env: Env = TensorEnv()
        self._plans: dict[Number, Executable | Unusable] = {}
        self._journal = BatchJournal(self._plans)
        self._failures: list[Failure] = []
        self._number = -1  # of the current or last operation
        self._first = 0  # of the current or last batch
        self._begun: int | None = None  # the first operation of the current compiled step
        self._replaying: Replay | None = None
        self._running = ""  # the name of the current operation or request
        self._is_running = False
        self._stopwatch = Stopwatch()
        self._halted: Failure | None = None  # the failure after which nothing runs in this generation
        self._reached = (0, 0)  # operations done and begun at the halt
        self._marks: deque[tuple[int, Any]] | None = deque() if mesh.device_type == "cuda" else None
        self._computed: int | None = None  # operations that the device had done when the generation ended

    @property
    def done(self) -> int:
        """Number of operations done. Thread-safe."""
        return max(self._turn_done, self._number if self._is_running else self._number + 1)

    def operation_in(self, frame: FrameType) -> tuple[int, int] | None:
        """Returns the stream and the number of the operation that runs in this frame; None in a graph."""
        if self._begun is None:
            return self._stream, self._number
        index = None if self._replaying is None else self._replaying.operation_in(frame)
        return None if index is None else (self._stream, self._begun + index)

    def operation_name(self, frame: FrameType) -> str:
        """Returns the operation that runs in this frame; "" for a function of the program. Thread-safe."""
        replaying = self._replaying
        if replaying is not None:
            index = replaying.operation_in(frame)
            return "a compiled step" if index is None else replaying.name_of(index)
        return self._running

    def usage(self) -> MemoryUsed:
        """Memory and time of the stream in this process. Thread-safe."""
        return usage(list(self.env.values()), self._stopwatch, self._mesh.device_type)

    @property
    def reached(self) -> tuple[int, int]:
        """Numbers of operations done and begun."""
        done, begun = self._reached if self._halted is not None else (self._number + 1, self._number + 1)
        return (done if self._computed is None else min(done, self._computed)), begun

    def held(self) -> list[int]:
        """Returns the tensors whose shards are here, by number, without those that a device has not computed."""
        uncomputed = set[Number]() if self._computed is None else self._journal.touched(self._computed, sys.maxsize)[0]
        return [int(n) for n, value in self.env.items() if isinstance(value, DTensor) and n not in uncomputed]

    def restore(self, contents: StreamContents) -> None:
        """Sends shards to new processes or receives them; blocks. Everything but these contents is dropped."""
        shards: Env = {number: self.env[number] for number in contents.kept if number in self.env}
        for source, target, numbers in contents.transfers:
            if self._rank == source:
                send([shards[number] for number in numbers], self._ranks[target])
            elif self._rank == target:
                shards.update(zip(numbers, receive(self._mesh, self._ranks[source]), strict=True))
        self.env.clear()
        self.env.update(shards)
        self._number, self.is_whole = contents.operations - 1, True

    def settle(self) -> None:
        """Notes what the device has computed so far, before pending collectives are ended: others are lost. Any thread.

        A host issues operations long before a device executes them, and a device that waits for an ended collective
        returns garbage.
        """
        if self._marks is None or self._computed is not None:
            return
        marks = tuple(self._marks)
        if device_settles():
            self._computed = self._number if self._is_running else self._number + 1
            return
        issued = self._first if self._is_running else self._number + 1
        self._computed = next((first for first, mark in marks if not mark.query()), issued)

    @property
    def is_halted(self) -> bool:
        """True if commands are skipped, since this generation of the group is over."""
        return self._halted is not None

    def run(
        self, first: int, numbers: Sequence[Number], objects: Sequence[object], turn: Turn | None = None
    ) -> tuple[list[Failure], list[object]]:
        """Runs a batch from operation `first` on, a part of it in its turn; returns failures and requested values."""
        self._turn_done, THREAD.generators = first, self._generators  # first: operations done remain done
        self._number, self._failures, self._first, self._is_running, self.is_whole = first - 1, [], first, True, True
        self._journal.note(first, numbers, objects)
        values: list[object] = []
        try:
            if self._halted is None and self._member.over is not None:
                self._halt(self._generation_failure(), (first, first))
            pending = deque(objects)
            position = self._execute(numbers, pending, values, 0, len(numbers) if turn is None else turn.begin)
            if turn is not None and self._halted is None:
                self._turn_done = self._number + 1
                self._begin_turn(turn)
                position = self._execute(numbers, pending, values, position, turn.end)
                self._turn_done = self._number + 1
                self._order.advanced()
                position = self._execute(numbers, pending, values, position, len(numbers))
            if self._halted is not None:
                self._skip_batch(numbers, position, pending, values)
        finally:
            self._is_running = False
            BORROWED.give_back()
            self._mark(first)
        return self._failures, values

    def _mark(self, first: int) -> None:
        """Puts a mark into the device's work, behind a batch that begins with operation `first`."""
        if self._marks is None:
            return
        while self._marks and self._marks[0][1].query():
            self._marks.popleft()
        self._marks.append((first, mark_on_device()))

    def _begin_turn(self, turn: Turn) -> None:
        """Waits for the turn of this batch; halts if the generation ends before."""
        try:
            self._order.await_turn(turn, self._ranks[self._rank])
            self._connect()
        except Exception:
            if self._member.over is None:
                raise
            self._halt(self._generation_failure(), (self._number + 1, self._number + 1))

    def _execute(
        self, numbers: Sequence[Number], pending: deque[object], values: list[object], position: int, end: int
    ) -> int:
        """Runs commands from one position to another; returns where it stopped."""
        env, plans = self.env, self._plans
        with torch.no_grad():
            while position < end and self._halted is None:
                code = numbers[position]
                if code == FREE:
                    env.pop(numbers[position + 1], None)
                    position += 2
                    continue
                self._number += 1
                if code == OBJECT:
                    position += 1
                    self._running = ""
                    self._run_object(pending.popleft(), values)
                    continue
                if code in REQUESTS:
                    self._running = "full_tensor" if code != SHARDS else "local_shards"
                    self._reply(code, numbers[position + 1], values)
                    position += 2
                    continue
                if code == OWN:
                    self._running = "fetch_shard"
                    self._reply(code, numbers[position + 1], values, numbers[position + 2])
                    position += 3
                    continue
                if code == REPLAY:
                    position = self._replay(numbers, position + 1)
                    continue
                plan = plans[code]
                command = numbers[position : position + plan.length]
                self._running = plan.operation
                try:
                    plan.run(command)
                except BaseException as error:
                    self._fail(plan, command, error)
                position += plan.length
        return position

    # -- when the group is over -------------------------------------------------------------------------------------

    def _halt(self, failure: Failure, reached: tuple[int, int]) -> None:
        self._halted, self._reached = failure, reached

    def _skip_batch(
        self, numbers: Sequence[Number], position: int, pending: deque[object], values: list[object]
    ) -> None:
        """Skips commands after a halt, but counts operations and stores plans."""
        halted = self._halted
        assert halted is not None
        lost = LostTensor(halted)
        while position < len(numbers):
            code = numbers[position]
            if code == FREE:
                self.env.pop(numbers[position + 1], None)
                position += 2
                continue
            self._number += 1
            if code == OBJECT:
                position += 1
                command = pending.popleft()
                if isinstance(command, Define | Making | Trace | DrawFrom):
                    self._run_object(command, values)
                elif isinstance(command, PutTensor | Locals | MakeParts | Take):
                    self.env[command.result] = lost
                elif isinstance(command, CallRemote | Name):
                    self.env.update(dict.fromkeys(command.results, lost))
                    withdraw(command, halted)
                    if isinstance(command, CallRemote) and command.has_reply:
                        values.append(halted)
                elif isinstance(command, RunFunction):
                    values.append(halted)
            elif code in REQUESTS:
                values.append(halted)
                position += 2
            elif code == OWN:
                values.append(halted)
                position += 3
            elif code == REPLAY:
                position = self._skip_replay(numbers, position + 1, lost)
            else:
                plan = self._plans[code]
                for number in numbers[position : position + plan.length][plan.results]:
                    self.env[number] = lost
                position += plan.length

    def resume(self, start: int, stop: int) -> None:
        """Resumes in the next generation.

        All ranks have done the operations before `start`, and none has begun those from `stop` on. Results of the
        operations between differ between ranks, and are lost.
        """
        results, written = self._journal.touched(start, stop)
        lost = LostTensor(self._halted or self._generation_failure())
        for number in results | {number for number in written if number in self.env}:
            self.env[number] = lost
        self._halted = self._computed = None
        if self._marks is not None:
            self._marks.clear()

    def _generation_failure(self) -> Failure:
        over = self._member.over
        if over is not None and over.failures:
            return over.failures[0]
        reason = over.reason if over is not None else "the mesh was grouped anew"
        return Failure(self._number, "", self._rank, "DeviceMeshError", reason, "", self._stream)

    def tensor(self, number: Number) -> DTensor:
        """Returns a tensor by number. Raises LostInputError if it could not be made."""
        value: DTensor | LostTensor = self.env[number]
        if isinstance(value, LostTensor):
            raise LostInputError(value.failure)
        return value

    # -- requested values -------------------------------------------------------------------------------------------

    def _reply(self, code: Number, number: Number, values: list[object], rank: Number | None = None) -> None:
        try:
            value = self._value(code, self.tensor(number), rank)
            if self._marks is not None and self._member.over is not None:  # of collectives that have been ended
                raise RuntimeError(self._member.over.reason)
            values.append(value)
        except BaseException as error:
            values.append(self._failure("full_tensor" if code != SHARDS else "local_shards", error))

    def _value(self, code: Number, tensor: DTensor, rank: Number | None) -> object:
        if code == OWN:
            return tensor.to_local().cpu() if rank == self._rank else None
        if code == SHARDS:
            return tensor.to_local().cpu()
        local = whole(tensor)
        if self._rank:
            return None
        return local.item() if code == NUMBER else local.cpu()

    # -- commands other than operations -----------------------------------------------------------------------------

    def _run_object(self, command: object, values: list[object]) -> None:
        try:
            value = self._dispatch(command)
        except BaseException as error:
            function = command if isinstance(command, FunctionCommand) else None
            title = type(command).__name__.lower() if function is None else function.name
            if isinstance(command, Name) or (isinstance(command, CallRemote) and not command.joined):
                value = failure = self._own_failure(title, error, function)
            else:
                value = failure = self._failure(title, error, function)
            if isinstance(command, CallRemote):
                withdraw(command, failure)
                self._lose(self._changed if command.has_reply else command.writes, LostTensor(failure))
                results = (*command.results, *filter(None, [command.bundle]))
                self.env.update(dict.fromkeys(results, LostTensor(failure)))
            elif isinstance(command, PutTensor | Locals | MakeParts | Take):
                self.env[command.result] = LostTensor(failure)
            elif isinstance(command, Name):
                self.env.update(dict.fromkeys(command.results, LostTensor(failure)))
            elif isinstance(command, Trace):
                self.env[command.number] = LostTensor(failure)
            elif isinstance(command, Define | Making):
                self._plans[command.number] = Unusable(command, failure)
        if isinstance(command, RunFunction) or (isinstance(command, CallRemote) and command.has_reply):
            values.append(value)

    def _dispatch(self, command: object) -> object:
        if isinstance(command, FunctionCommand):
            self._changed: Sequence[Number] = ()  # by the call so far
            command = command.unpack()
        match command:
            case Define() | Making():
                self._plans[command.number] = Executable(command, self.env, self._mesh, self._stopwatch)
            case PutTensor():
                tensor = command.tensor.to(self._mesh.device_type)
                self.env[command.result] = distributed(tensor, self._mesh, command.placements)
            case Locals():
                self.env[command.result] = wrap_shard(command.tensors[self._rank], command.made, self._mesh)
            case MakeParts():
                with drawn_by_function(), self._interruptible():
                    self.env[command.result] = make_in_parts(command, self._mesh)
            case Cell():
                self._stopwatch.begin(command.number)
            case Send():
                value = self.env[command.number]
                local = value if isinstance(value, LostTensor) else value.to_local()
                targets, mine = command.targets[self._rank], self._ranks[self._rank]
                self._transit.send(local, targets, mine, command.tag, command.lends)
            case Take():
                lost = None
                if command.late:
                    text = "it was on its way to this stream or mesh when the process groups ended"
                    lost = Failure(self._number, "to_mesh", self._rank, "DeviceMeshError", text, "", self._stream, True)
                    self._failures.append(lost)
                shard = self._transit.take(command.sources[self._rank], self._ranks[self._rank], command.tag, lost)
                if isinstance(shard, torch.Tensor):
                    shard = (own if command.lends else partial(wrap_shard, meta=command.made))(shard, mesh=self._mesh)
                self.env[command.result] = shard
            case DrawFrom():
                self._generators.follow(command)
            case Await():
                if command.members is None or self._ranks[self._rank] in command.members:
                    self._order.await_done(command.stream, command.operations)
            case Revive():
                if isinstance(self.env[command.result], LostTensor):
                    self.env[command.result] = empty(command.made, self._mesh)
            case Trace():
                self.env[command.number] = Replay(command, self._mesh, self._stopwatch)
            case CallRemote():
                return self._call(command)
            case Name():
                self._keep(command.results, self.env.pop(command.bundle))
            case RunFunction():
                shards: dict[Number, torch.Tensor] = {}
                args, kwargs = fill_in((command.args, command.kwargs), self.tensor, self._mesh, shards)
                with sizes_kept(shards.values()), torch.enable_grad(), drawn_by_function(), self._interruptible():
                    return sendable(off_device(command.function(*args, **kwargs)))
        return None

    def _call(self, command: CallRemote) -> object:
        """Calls a function of the program; returns the part of its result that the command requests."""
        if command.only is not None and command.only != self._rank:
            return None
        inputs: dict[Number, torch.Tensor] = {}
        args, kwargs = fill_in((command.args, command.kwargs), self.tensor, self._mesh, inputs)
        function = function_at(command.function) if isinstance(command.function, str) else command.function
        versions = [tensor._version for tensor in inputs.values()]
        try:
            with sizes_kept(inputs.values()), torch.enable_grad(), drawn_by_function(), self._interruptible():
                value = function(*args, **kwargs)
        finally:
            pairs = zip(inputs.items(), versions, strict=True)
            self._changed = [number for (number, tensor), version in pairs if tensor._version != version]
        if command.replies:
            return sendable(off_device(value))
        results = [own(detach(leaf), self._mesh) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if command.bundle is None:
            self._keep(command.results, results)
            return None
        described = sendable(to_returned(value, list(inputs.values()), versions, layout_of(self._mesh)))
        self.env[command.bundle] = results
        return described

    def _keep(self, numbers: Sequence[Number], tensors: Sequence[DTensor] | LostTensor) -> None:
        """Stores the tensors that a call has returned."""
        if isinstance(tensors, LostTensor):
            self.env.update(dict.fromkeys(numbers, tensors))
            return
        if len(tensors) != len(numbers):
            raise ValueError(f"unexpected number of returns from op, expected {len(numbers)}, got {len(tensors)}")
        for number, tensor in zip(numbers, tensors, strict=True):
            self.env[number] = tensor

    # -- compiled steps ---------------------------------------------------------------------------------------------

    def _replay(self, numbers: Sequence[Number], position: int) -> int:
        """Runs a compiled step, which counts as all its operations; returns the index of the next command."""
        program, operations, inputs, outputs, seed = map(int, numbers[position : position + 5])
        begin, middle, end = position + 5, position + 5 + inputs, position + 5 + inputs + outputs
        first = self._begun = self._number

        def failed(operation: int, name: str, error: BaseException) -> Failure:
            self._number = first + operation
            if isinstance(replay, Replay) and replay.is_own:
                return self._own_failure(name, error)
            failure = self._failure(name, error)
            if self._halted is not None:
                raise HaltedError
            return failure

        replay = self.env[program]
        if isinstance(replay, LostTensor):
            self.env.update(dict.fromkeys(numbers[middle:end], replay))
        else:
            changed = replay.written(numbers[begin:middle])
            self._journal.replayed(first, operations, numbers[middle:end], changed)
            self._replaying = replay
            try:
                replay.run(self.env, numbers[begin:middle], numbers[middle:end], seed, failed)
            except HaltedError:
                assert self._halted is not None
                self.env.update(dict.fromkeys((*numbers[middle:end], *changed), LostTensor(self._halted)))
                self._reached = (first, first + operations)
        self._begun = self._replaying = None
        self._number = first + operations - 1
        return end

    def _skip_replay(self, numbers: Sequence[Number], position: int, lost: LostTensor) -> int:
        """Skips a compiled step; returns the index of the next command."""
        program, operations, inputs, outputs = map(int, numbers[position : position + 4])
        middle = position + 5 + inputs
        replay, results = self.env[program], numbers[middle : middle + outputs]
        changed = [] if isinstance(replay, LostTensor) else replay.written(numbers[position + 5 : middle])
        self._journal.replayed(self._number, operations, results, changed)
        self.env.update(dict.fromkeys(results, lost))
        self._number += operations - 1
        return middle + outputs

    # -- failures ---------------------------------------------------------------------------------------------------

    def _fail(self, plan: PlanSignature, command: Sequence[Number], error: BaseException) -> None:
        """Marks the results of a failed operation as lost, and its targets if it has begun."""
        tensors = command[plan.tensors]
        before = (self.env[number] for number in tensors)
        lost = next((value for value in before if isinstance(value, LostTensor)), None)
        changed = command[plan.results]
        if isinstance(error, LostInputError | DifferentShapesError) if plan.agrees else plan.own:
            if lost is None:
                lost = LostTensor(self._own_failure(plan.operation, error))
            self._lose([tensors[index] for index in plan.writes], lost)
        elif lost is None:
            lost = LostTensor(self._failure(plan.operation, error, is_own=plan.own))
            if not isinstance(error, LostInputError):
                changed = (*changed, *(tensors[index] for index in plan.writes))
        for number in changed:
            self.env[number] = lost

    def _lose(self, numbers: Sequence[Number], lost: LostTensor) -> None:
        """Marks tensors as lost, and all that share their memory: other streams may have borrowed, or lent it."""
        tensors = [value for number in numbers if isinstance(value := self.env[number], DTensor)]
        memories = {value._local_tensor.untyped_storage()._cdata for value in tensors}
        for env in self._envs() if memories else ():
            for number, value in tuple(env.copy().items()):  # its stream may run meanwhile
                if isinstance(value, DTensor) and value._local_tensor.untyped_storage()._cdata in memories:
                    env[number] = lost
        self.env.update(dict.fromkeys(numbers, lost))

    def _own_failure(self, operation: str, error: BaseException, function: FunctionCommand | None = None) -> Failure:
        """Reports an error in an operation on this rank's own values; all ranks continue."""
        if isinstance(error, LostInputError):
            return error.failure
        failure = self._describe(operation, error, function, apart=True)
        self._failures.append(failure)
        return failure

    def _failure(
        self, operation: str, error: BaseException, function: FunctionCommand | None = None, *, is_own: bool = False
    ) -> Failure:
        """Reports an error; halts this generation unless all ranks have failed in the same operation.

        For a rank's own values the failure then concerns only fetches, which raise it.
        """
        if isinstance(error, LostInputError):
            return error.failure
        failure = self._describe(operation, error, function)
        if self._member.over is None and self._member.all_failed(failure, self._ranks, self._begun):
            failure = replace(failure, apart=is_own)
            self._failures.append(failure)
            return failure
        over = self._member.over
        if over is not None and any(
            (failed.stream, failed.number, failed.rank) == (self._stream, self._number, self._rank)
            for failed in over.failures
        ):
            self._failures.append(failure)
        else:  # a consequence of the end of the generation
            failure = self._generation_failure()
        if self._halted is None:
            self._halt(failure, (self._number, self._number + 1))
        return failure

    def _describe(
        self, operation: str, error: BaseException, function: FunctionCommand | None, *, apart: bool = False
    ) -> Failure:
        kind, largest = type(error).__name__, held_if_full(error, self.env)
        text = "".join(traceback.format_exception_only(error) if function is None else format_exception(error))
        return Failure(self._number, operation, self._rank, kind, str(error), text, self._stream, apart, largest)
