"""Plans in one worker, each of which runs on the tensors that a command names."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_nb.tensor.commands import Define, Making, Number
from monarch_nb.tensor.propagation import Meta, Runner
from monarch_nb.tensor.workers.making import maker
from monarch_nb.tensor.workers.randomness import seeder
from monarch_nb.tensor.workers.usage import Stopwatch
from monarch_nb.wire import kind_of

Env = dict[Number, Any]  # tensors of a stream, by number


class PlanSignature:
    """Layout of the commands of a plan: slices of a command for tensors, floats and results; `length` is the total."""

    def __init__(self, definition: Define | Making) -> None:
        if isinstance(definition, Define):
            self.operation, seeded, inputs, floats = (
                definition.operation,
                definition.program.seeded,
                definition.program.inputs,
                definition.scalars,
            )
            self.made, self.writes = definition.made, definition.writes
        else:
            self.operation, seeded, inputs, floats = definition.operation, definition.seeded, 0, 0
            self.made, self.writes = (definition.made,), ()
        first = 1 if seeded is None else 2
        self.seeded = seeded
        self.tensors = slice(first, first + inputs)
        self.floats = slice(first + inputs, first + inputs + floats)
        self.results = slice(first + inputs + floats, first + inputs + floats + len(self.made))
        self.length = self.results.stop


class Executable(PlanSignature):
    """A plan that is ready to run on a mesh."""

    def __init__(self, definition: Define | Making, env: Env, mesh: DeviceMesh, stopwatch: Stopwatch) -> None:
        super().__init__(definition)
        self._env = env
        self._agreed = not self.made
        self._seed = seeder(mesh, self.seeded) if self.seeded is not None else None
        self._call: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
        if isinstance(definition, Define):
            self._call = Runner(definition.program, mesh, stopwatch.placed)
        else:
            make = maker(definition, mesh)
            self._call = lambda tensors, floats: (make(),)

    def run(self, command: Sequence[Number]) -> None:
        """Runs the plan on a command. Raises what its operations raise."""
        env = self._env
        tensors = [env[number] for number in command[self.tensors]]
        if self._seed is not None:
            self._seed(int(command[1]))
        made = self._call(tensors, command[self.floats])
        for number, tensor in zip(command[self.results], made, strict=True):
            env[number] = tensor
        if not self._agreed:
            self._compare(made)

    def _compare(self, made: Sequence[Any]) -> None:
        """Checks on the first run that the results are those that the controller predicted."""
        for tensor, meta in zip(made, self.made, strict=True):
            different = _difference(tensor, meta)
            if different:
                raise RuntimeError(
                    f"{self.operation} gave {different} here, which is not what the controller worked out: the "
                    "versions of torch differ, or this is a defect of Monarch-NB"
                )
        self._agreed = True


def _difference(made: Any, expected: Meta) -> str:
    if not isinstance(made, DTensor):
        return kind_of(made)
    if tuple(made.shape) != expected.shape:
        return f"shape {tuple(made.shape)} in place of {expected.shape}"
    if made.dtype != expected.dtype:
        return f"{made.dtype} in place of {expected.dtype}"
    if made.placements != expected.placements:
        return f"placements {made.placements} in place of {expected.placements}"
    return ""
