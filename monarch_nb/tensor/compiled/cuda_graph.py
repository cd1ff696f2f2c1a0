"""A compiled step as a CUDA graph, which the device replays with one launch.

Source: "CUDA Graphs", docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from monarch_nb.tensor.errors import CompileWarning

_MAX_WASTED = 8  # captures, after which the step is no longer captured
Run = Callable[[list[torch.Tensor], int], list[torch.Tensor]]


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
