"""Execution of compiled steps on a worker, also as a CUDA graph, which the device replays with one launch.

Source: "CUDA Graphs", docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import has_side_effect

from monarch_nb.tensor.commands import Define, Number
from monarch_nb.tensor.compiled.program import Sent, Trace
from monarch_nb.tensor.compiled.source import Constant, FunctionSource, assigned, source_of, variables
from monarch_nb.tensor.errors import CompileWarning
from monarch_nb.tensor.propagation import (
    Measured,
    Redistributor,
    dtensor,
    exchanging,
    finisher,
    leaves,
    mover,
    moving,
    overload,
    spec_of,
    unmeasured,
)
from monarch_nb.tensor.seeds import BORROWED, seed_after, seeder
from monarch_nb.tensor.verbs import Failure, LostTensor
from monarch_nb.tensor.workers.plans import Env, distributed, maker
from monarch_nb.tensor.workers.usage import Stopwatch

_MAX_WASTED = 8  # captures, after which the step is no longer captured
Run = Callable[[list[torch.Tensor], int], list[torch.Tensor]]
Failed = Callable[[int, str, BaseException], Failure]  # index of the operation, its name, the error


class CudaGraph:
    """Runs a step's function directly at first, and from the next call on as a graph that has captured it.

    The first `varying` inputs are other tensors in each call, and further ones may be: these are copied into memory of
    the graph. The rest is used in place; once such a tensor has another address, the step is captured again. Results
    are copied out of the graph's memory, which the next call overwrites, except views of inputs. `written` are the
    inputs that the step writes to.
    """

    def __init__(self, run: Run, varying: int, written: Sequence[int], title: str) -> None:
        self._run, self._varying, self._written, self._title = run, varying, written, title
        self._warm = self._refused = False
        self._moved: Counter[int] = Counter()  # captures that a moved input has caused, by input
        self._viewed: set[int] = set()  # inputs of which results are views
        self._wasted = 0  # captures since the last call that used a graph again
        self._inputs: dict[int, torch.Tensor] = {}  # the memory into which inputs are copied
        self._addresses: dict[int, int] = {}  # of the other inputs at the capture
        self._results: list[tuple[torch.Tensor, bool]] = []  # results, and whether the graph's memory holds them
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Runs the step. The seed is unused: a step that draws random numbers has no such graph."""
        if not self._warm or self._refused:
            self._warm = True  # kernels are loaded, and libraries have their memory
            return self._run(inputs, seed)
        moved = [register for register, address in self._addresses.items() if inputs[register].data_ptr() != address]
        if self._replay is not None and not moved:
            self._wasted = 0
        else:
            self._moved.update(moved)
            try:
                if self._wasted == _MAX_WASTED:
                    raise RuntimeError("tensors of which it has views lie elsewhere in each call")
                self._wasted += 1
                self._capture(inputs)
            except RuntimeError as error:  # it cannot be captured: nothing has run
                self._refused, self._replay, self._results, self._inputs = True, None, [], {}
                reason = str(error).partition("\n")[0]
                text = f"{self._title} runs without a CUDA graph, since its operations cannot be captured: {reason}"
                warnings.warn(text, CompileWarning, stacklevel=2)
                return self._run(inputs, seed)
        assert self._replay is not None
        for register, copy in self._inputs.items():
            copy.copy_(inputs[register])
        self._replay()
        for register in self._written:
            if register in self._inputs:
                inputs[register].copy_(self._inputs[register])
        return [tensor.clone() if is_held else tensor for tensor, is_held in self._results]

    def _capture(self, inputs: Sequence[torch.Tensor]) -> None:
        self._replay, self._results = None, []  # frees the memory of the last graph
        uses = Counter(map(_memory, inputs))
        self._inputs = {
            register: tensor.clone()
            for register, tensor in enumerate(inputs)
            if (register < self._varying or self._moved[register] > 1)
            and uses[_memory(tensor)] == 1
            and register not in self._viewed
            and torch.ops.aten.is_non_overlapping_and_dense(tensor)  # else a clone has other strides
        }
        buffers = [self._inputs.get(register, tensor) for register, tensor in enumerate(inputs)]
        self._addresses = {index: tensor.data_ptr() for index, tensor in enumerate(inputs) if index not in self._inputs}
        replay, results = captured(lambda: self._run(buffers, 0))
        copies = {_memory(tensor): register for register, tensor in self._inputs.items()}
        viewed = {copies[memory] for memory in map(_memory, results) if memory in copies}
        if viewed:
            self._viewed |= viewed
            self._capture(inputs)
            return
        memories = set(uses)
        self._results = [(tensor, _memory(tensor) not in memories) for tensor in results]
        addresses = [_memory(tensor) for tensor, is_held in self._results if is_held]
        if len(set(addresses)) < len(addresses):
            raise RuntimeError("two of its results share memory")
        self._replay = replay


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that a tensor shares with its views; a unique number without elements."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def captured(run: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Captures a function without running it; returns its replay, and its results. Raises RuntimeError."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads use the device meanwhile
        results = run()
    return graph.replay, results


class Seeds:
    """Seeds generators between the operations of a graph, whose other numbers are constants."""

    def __init__(self) -> None:
        self.number = 0

    def node_of(self, seed: Callable[[int], None]) -> Callable[[int, int], None]:
        """Returns the seeding function of the source, which becomes a node while the graph is traced."""

        def at_run_time(drawn: int) -> None:
            seed(seed_after(self.number, drawn))

        has_side_effect(at_run_time)

        def while_tracing(number: int, drawn: int) -> None:
            mode = get_proxy_mode()
            assert mode is not None
            mode.tracer.create_node("call_function", at_run_time, (drawn,), {})

        return while_tracing


def _graph_of(
    source: FunctionSource, names: dict[str, Any], shards: Sequence[torch.Tensor], seeds: Seeds, backend: str
) -> Run:
    """Traces the function of a source without running it. Inductor compiles on the first run."""
    exec(source.text, names)
    run = names["run"]
    table = {torch.ops.aten._fused_adamw_.default: _fused_adamw} if backend == "inductor" else {}
    graph: Any = make_fx(
        lambda *args: run(list(args), 0), decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True
    )(*shards)
    if backend == "inductor":
        graph = torch.compile(graph, fullgraph=True, dynamic=False)

    def called(inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        seeds.number = seed
        return list(graph(*inputs))

    return called


def _fused_adamw(
    parameters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    most: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Decomposes fused AdamW (Loshchilov and Hutter 2019), since inductor lacks operations that write to lists."""
    if amsgrad or grad_scale is not None or found_inf is not None:
        raise NotImplementedError('AdamW with amsgrad or a scaled gradient has no graph: use backend="python"')
    for parameter, grad, mean, square, step in zip(parameters, grads, means, squares, steps, strict=True):
        gradient = -grad if maximize else grad
        parameter.mul_(1 - lr * weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.sqrt() / (1 - beta2**step).sqrt() + eps
        parameter.sub_(mean / divisor * (lr / (1 - beta1**step)))


class Replay:
    """A program on one mesh."""

    def __init__(self, trace: Trace, mesh: DeviceMesh, stopwatch: Stopwatch) -> None:
        program = self._program = trace.program
        self._fixed = trace.fixed
        self._source = source_of(program)
        self._file = f"<compiled step {trace.number}>"
        self._backend = trace.backend
        measured = stopwatch.measured if trace.backend == "python" else unmeasured  # graphs contain their collectives
        self._names = linked(self._source, mesh, measured)
        exec(compile(self._source.text, self._file, "exec"), self._names)
        self._run: Run | None = self._names["run"] if trace.backend == "python" else None
        if trace.backend == "cudagraphs":
            varying = len(program.inputs) - len(trace.fixed)
            self._run = CudaGraph(self._names["run"], varying, program.written, self._file)
        self._mesh = mesh
        metas = program.metas
        self.is_own = all(meta.is_own for meta in metas)  # results of a failure on one rank are lost there alone
        self._specs = [spec_of(metas[register], mesh) for register in program.results]
        # Each operation passes fewer kernels, which saves a twentieth of a step. Graphs are traced with all of them.
        self._below_autograd: Callable[[], AbstractContextManager[object]] = (
            torch._C._AutoDispatchBelowAutograd if trace.backend == "python" else nullcontext
        )
        self._draws = any(constant.kind == "seed" for constant in self._source.constants.values())

    def run(self, env: Env, arguments: Sequence[Number], into: Sequence[Number], seed: int, failed: Failed) -> None:
        """Runs the program. After a failure the affected tensors are lost, as without a program."""
        numbers = (*arguments, *self._fixed)
        tensors = [env[number] for number in numbers]
        for number in {*into} - {*numbers}:  # frees the previous tensor of this number first
            env.pop(number, None)
        if LostTensor in map(type, tensors):
            lost = {f"r{i}": value for i, value in enumerate(tensors) if isinstance(value, LostTensor)}
            present = {f"r{i}": value._local_tensor for i, value in enumerate(tensors) if f"r{i}" not in lost}
            self._run_remaining(env, numbers, into, present | {"seed": seed}, lost, 0, failed)
            return
        shards = [tensor._local_tensor for tensor in tensors]
        draws = self._draws and (self.is_own or BORROWED.is_shared)
        try:
            with BORROWED if draws else nullcontext(), self._below_autograd():
                results = (self._run or self._graph(shards))(shards, seed)
        except BaseException as error:
            if self._backend != "python":
                self._lose_all(env, numbers, into, error, failed)
                return
            values, line = self._state_at(error)
            lost = self._lose(line, error, failed)
            self._run_remaining(env, numbers, into, values, lost, line + 1, failed)
            return
        for number, shard, spec in zip(into, results, self._specs, strict=True):
            env[number] = dtensor(shard, spec, requires_grad=False)

    def _graph(self, shards: list[torch.Tensor]) -> Run:

        seeds = Seeds()
        names = dict(self._names)
        for name, constant in self._source.constants.items():
            if constant.kind == "seed":
                names[name] = seeds.node_of(seeder(self._mesh, constant.value))
        self._run = _graph_of(self._source, names, shards, seeds, self._backend)
        return self._run

    def written(self, arguments: Sequence[Number]) -> list[Number]:
        """Returns the numbers of the tensors that the program writes to."""
        numbers = (*arguments, *self._fixed)
        return [numbers[register] for register in self._program.written]

    def operation_in(self, frame: FrameType | None) -> int | None:
        """Returns the index of the operation that runs in this frame; None in a compiled graph."""
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return self._source.operations[frame.f_lineno - self._source.first_line]
            frame = frame.f_back
        return None

    def name_of(self, operation: int) -> str:
        """Returns the name of an operation by its index."""
        return self._program.operations[operation].name

    # -- when an operation fails ------------------------------------------------------------------------------------

    def _state_at(self, error: BaseException) -> tuple[dict[str, object], int]:
        """Returns the registers at the error, and the index of the failed line."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                return dict(trace.tb_frame.f_locals), trace.tb_lineno - self._source.first_line
            trace = trace.tb_next
        raise error

    def _lose_all(
        self, env: Env, numbers: Sequence[Number], into: Sequence[Number], error: BaseException, failed: Failed
    ) -> None:
        """Marks all results and written tensors as lost, since the progress in a graph is unknown."""
        lost = LostTensor(failed(0, f"a compiled step ({self._backend})", error))
        env.update(dict.fromkeys((*into, *(numbers[register] for register in self._program.written)), lost))

    def _lose(self, line: int, error: BaseException, failed: Failed) -> dict[str, LostTensor]:
        """Reports the failed operation of a line; returns the registers that are lost."""
        operation = self._source.operations[line]
        lost = LostTensor(failed(operation, self._program.operations[operation].name, error))
        return dict.fromkeys((*self._touched(operation), *assigned(self._source.lines[line])), lost)

    def _touched(self, index: int) -> Iterable[str]:
        """Yields the registers of the results and written tensors of an operation."""
        operation = self._program.operations[index]
        writes = operation.action.writes if isinstance(operation.action, Define) else ()
        return (
            *(f"r{register}" for register in operation.results),
            *(f"r{operation.tensors[argument]}" for argument in writes),
        )

    def _run_remaining(
        self,
        env: Env,
        numbers: Sequence[Number],
        into: Sequence[Number],
        values: dict[str, object],
        lost: dict[str, LostTensor],
        first: int,
        failed: Failed,
    ) -> None:
        """Runs the following lines one by one, without those that need lost tensors."""
        program, source = self._program, self._source
        broken: dict[int, LostTensor | None] = {}  # failed operations, with their lost results
        if first:
            broken[source.operations[first - 1]] = next(iter(lost.values()), None)
        for line in range(first, len(source.lines)):
            number = source.operations[line]
            operation = program.operations[number]
            reason = next((lost[f"r{register}"] for register in operation.tensors if f"r{register}" in lost), None)
            if reason is not None:
                lost.update({f"r{register}": reason for register in operation.results})
                broken[number] = reason
            if number in broken:  # whose collective may have given results of other operations too
                if (reason := broken[number]) is not None:
                    lost.update(dict.fromkeys(assigned(source.lines[line]), reason))
                for name in variables(source.lines[line].partition("; del ")[2]):
                    values.pop(name, None)
                continue
            try:
                exec(source.lines[line], self._names, values)
            except BaseException as error:
                lost.update(failure := self._lose(line, error, failed))
                broken[number] = next(iter(failure.values()), None)
        for register, spec, result in zip(program.results, self._specs, into, strict=True):
            name = f"r{register}"
            env[result] = lost[name] if name in lost else dtensor(values[name], spec, requires_grad=False)
        for register in program.written:
            if f"r{register}" in lost:
                env[numbers[register]] = lost[f"r{register}"]


def linked(source: FunctionSource, mesh: DeviceMesh, measured: Measured = unmeasured) -> dict[str, Any]:
    """Returns the values of the names in a source for this process."""
    names: dict[str, Any] = {"leaves": leaves, "sharded": _sharded}
    return names | {name: _link(constant, mesh, measured) for name, constant in source.constants.items()}


def _link(constant: Constant, mesh: DeviceMesh, measured: Measured) -> object:
    value = constant.value
    match constant.kind:
        case "operation":
            return overload(value)
        case "spec":
            return spec_of(value, mesh)
        case "exchange":
            dim, how, axes = value
            return exchanging(mesh, dim, how, axes, None)
        case "finish":
            dims, stride = value
            return measured(dims, finisher(stride))
        case "move":
            now, meta = value
            move = mover(spec_of(now, mesh), meta, spec_of(meta, mesh))
            return measured(moving(now.placements, meta.placements), move)
        case "redistribution":
            return Redistributor(value, spec_of(value, mesh), measured)
        case "maker":
            make = maker(value, mesh)
            return lambda: make()._local_tensor
        case "part":
            return _part(value, mesh)
        case "seed":
            seed = seeder(mesh, value)
            return lambda number, drawn: seed(seed_after(number, drawn))
    return value


def _part(constant: Sent, mesh: DeviceMesh) -> torch.Tensor:
    tensor = constant.tensor.to(mesh.device_type)
    return distributed(tensor, mesh, constant.made.placements)._local_tensor


def _sharded(shard: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return dtensor(shard, spec, requires_grad=False)
