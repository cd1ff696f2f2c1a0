"""Plans in one worker: each runs on the tensors that a command names."""

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


class Told:
    """Where things stand in the commands of a plan, counted from a command's start; `length` is how many there are."""

    def __init__(self, told: Define | Making) -> None:
        if isinstance(told, Define):
            self.operation, seeded, inputs, floats = (
                told.operation,
                told.program.seeded,
                told.program.inputs,
                told.scalars,
            )
            self.made, self.writes = told.made, told.writes
        else:
            self.operation, seeded, inputs, floats = told.operation, told.seeded, 0, 0
            self.made, self.writes = (told.made,), ()
        first = 1 if seeded is None else 2
        self.seeded = seeded
        self.tensors = slice(first, first + inputs)
        self.floats = slice(first + inputs, first + inputs + floats)
        self.results = slice(first + inputs + floats, first + inputs + floats + len(self.made))
        self.length = self.results.stop


class Executable(Told):
    """One plan, ready to run on a mesh."""

    def __init__(self, told: Define | Making, env: Env, mesh: DeviceMesh, stopwatch: Stopwatch) -> None:
        super().__init__(told)
        self._env = env
        self._agreed = not self.made
        self._seed = seeder(mesh, self.seeded) if self.seeded is not None else None
        self._call: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
        if isinstance(told, Define):
            self._call = Runner(told.program, mesh, stopwatch.placed)
        else:
            make = maker(told, mesh)
            self._call = lambda tensors, floats: (make(),)

    def run(self, command: Sequence[Number]) -> None:
        """Runs it. Raises what its operations raise."""
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
        """The controller's rules and this worker's have to agree, which is looked at once."""
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
