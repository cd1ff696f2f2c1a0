"""A compiled step as a CUDA graph, which the device replays with one launch.

Source: "CUDA Graphs", docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch_nb.tensor.compiled.errors import CompileWarning

__all__ = ["CudaGraph", "Run"]

Run = Callable[[list[torch.Tensor], int], list[torch.Tensor]]


class CudaGraph:
    """Runs a step's function as it is at first, and from the next call on as a graph that has captured it.

    The first `given` inputs are others with each call: they are copied into memory of the graph. The rest is used
    where it lies; once a tensor of it lies elsewhere, the step is captured again. Results are copied out of the
    graph's memory, which the next call overwrites; those that are views of inputs are not. `written` are those of the
    first inputs that the step writes to.
    """

    def __init__(self, run: Run, given: int, written: Sequence[int], title: str) -> None:
        self._run, self._given, self._written, self._title = run, given, written, title
        self._warm = self._refused = False
        self._addresses: list[int] = []  # of the inputs that stay, when the graph was captured
        self._inputs: list[torch.Tensor] = []  # what is copied into
        self._made: list[tuple[torch.Tensor, bool]] = []  # results, and whether the graph's memory holds them
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Runs the step. The seed is of no use: a step that draws random numbers has no such graph."""
        if not self._warm or self._refused:
            self._warm = True  # kernels are loaded, and libraries have their memory
            return self._run(inputs, seed)
        addresses = [tensor.data_ptr() for tensor in inputs[self._given :]]
        if self._replay is None or addresses != self._addresses:
            try:
                self._capture(inputs, addresses)
            except RuntimeError as error:  # it cannot be captured: nothing has run
                self._refused, self._replay = True, None
                why = str(error).partition("\n")[0]
                text = f"{self._title} runs without a CUDA graph, since its operations cannot be captured: {why}"
                warnings.warn(text, CompileWarning, stacklevel=2)
                return self._run(inputs, seed)
        assert self._replay is not None
        for mine, tensor in zip(self._inputs, inputs, strict=False):
            mine.copy_(tensor)
        self._replay()
        for register in self._written:
            inputs[register].copy_(self._inputs[register])
        return [tensor.clone() if held else tensor for tensor, held in self._made]

    def _capture(self, inputs: Sequence[torch.Tensor], addresses: list[int]) -> None:
        self._replay, self._made = None, []  # frees the memory of the last graph
        self._inputs = [tensor.clone() for tensor in inputs[: self._given]]
        placed = [*self._inputs, *inputs[self._given :]]
        self._replay, made = captured(lambda: self._run(placed, 0))
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs[self._given :]}
        self._made = [(tensor, tensor.untyped_storage().data_ptr() not in known) for tensor in made]
        self._addresses = addresses


def captured(run: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Captures a function without running it; returns what runs it, and its results. Raises RuntimeError."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads use the device meanwhile
        made = run()
    return graph.replay, made
