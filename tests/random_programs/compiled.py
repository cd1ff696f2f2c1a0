"""A program as a compiled step: its calls give the results of the same lines, uncompiled, on the same mesh."""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import monarch_nb
from monarch_nb.distributed import CompileWarning, Mesh
from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.propagation import PropagationError
from tests.random_programs.gather import ShardsDiffer, gather
from tests.random_programs.judge import (
    DEAD,
    EQUAL,
    HUNG,
    PATIENCE,
    REFUSED,
    UNJUDGED,
    WRONG,
    Differs,
    Hung,
    Outcome,
    bounded,
    distributed,
    grouped,
)
from tests.random_programs.local import Expected, expect
from tests.random_programs.program import Program, names_of_torch, values

CALLS = 6  # of which the first three are captured, or run uncompiled


def judge_compiled(
    program: Program, mesh: Mesh, expected: Expected | None = None, patience: int = PATIENCE, *, backend: str = "python"
) -> Outcome:
    """Calls a program without its lines that raise, some times, compiled and not; results are written to between."""
    expected = expected or expect(program)
    program = replace(
        program,
        lines=tuple(line for line in program.lines if not line.raises),
        heads=() if expected.backward_raises else program.heads,
    )
    call = -1
    try:
        with bounded(patience), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            draw = random.Random(program.seed)
            arguments = {source.name for source in program.inputs if not source.grad and draw.random() < 0.5}
            plain, compiled = _Calls(program, mesh, arguments), _Calls(program, mesh, arguments, backend)
            while (call := call + 1) < CALLS:
                try:
                    plain()
                except (DeviceMeshError, PropagationError):
                    raise
                except (RuntimeError, IndexError) as error:  # it can run once alone
                    return Outcome(UNJUDGED, grouped(str(error)), f"in call {call}, uncompiled: {error}")
                compiled()
                _compare(mesh, plain, compiled)
                for index in draw.sample(range(len(plain.results)), min(2, len(plain.results))):
                    if plain.results[index].is_floating_point() and _write(plain.results[index]):
                        _write(compiled.results[index])
                        _compare(mesh, plain, compiled)
            if not compiled.replayed:
                reason = next((str(item.message) for item in warned if item.category is CompileWarning), "no reason")
                return Outcome(REFUSED, grouped(reason.partition(": ")[2] or reason), reason)
    except Hung:
        return Outcome(HUNG, "hung", f"no end after {patience} s, in call {call}")
    except DeviceMeshError as error:
        return Outcome(DEAD, type(error).__name__, f"in call {call}: {error}")
    except PropagationError as error:
        return Outcome(REFUSED, grouped(str(error)), f"in call {call}: {error}")
    except (Differs, ShardsDiffer) as error:
        return Outcome(WRONG, grouped(str(error)), f"in call {call}: {error}")
    except Exception as error:
        return Outcome(WRONG, f"{type(error).__name__}: {grouped(str(error))}", f"in call {call}: {error!r}")
    return Outcome(EQUAL)


class _Calls:
    """Calls of a program, whose inputs are the same before each. Those that are no arguments belong to the step."""

    def __init__(self, program: Program, mesh: Mesh, arguments: set[str], backend: str = "") -> None:
        self._program, self._mesh = program, mesh
        self._inputs: dict[str, Any] = {source.name: distributed(source, program, mesh) for source in program.inputs}
        self._arguments = [name for name in self._inputs if name in arguments]
        fixed = {name: tensor for name, tensor in self._inputs.items() if name not in arguments}
        heads = [
            monarch_nb.distribute(values(head.seed, head.shape, head.dtype), mesh, head.placements)
            for head in program.heads
        ]
        text = "\n".join(line.text for line in program.lines)
        if program.heads:
            text += f"\ntorch.autograd.backward([{', '.join(head.name for head in program.heads)}], gradients)"
        code = compile(text, "<compiled program>", "exec")
        names = names_of_torch(torch, lambda tensor, placements: tensor.redistribute(placements).clone())
        order = list(self._arguments)
        outputs = [name for name in program.names if name not in self._inputs]

        def step(*inputs: Any) -> tuple[Any, ...]:
            tensors = {**fixed, **dict(zip(order, inputs, strict=True)), "gradients": heads}
            exec(code, names, tensors)
            return tuple(tensors[name].detach() for name in outputs)

        self._compiled = monarch_nb.compile(step, backend=backend, check_every=0) if backend else None
        self._step: Callable[..., tuple[Any, ...]] = self._compiled or step
        self.results: tuple[Any, ...] = ()

    @property
    def replayed(self) -> int:
        """Calls that ran as one message."""
        return self._compiled.calls if self._compiled is not None else 0

    def __call__(self) -> None:
        for source in self._program.inputs:
            if source.grad:
                self._inputs[source.name].grad = None
            else:
                self._inputs[source.name].detach_().copy_(distributed(source, self._program, self._mesh))
        self.results = self._step(*(self._inputs[name] for name in self._arguments))

    def everything(self) -> dict[str, Any]:
        """Results by number, inputs and their gradients by name."""
        tensors = {f"result {number}": tensor for number, tensor in enumerate(self.results)}
        tensors |= {name: tensor.detach() for name, tensor in self._inputs.items()}
        grads = {f"{name}.grad": tensor.grad for name, tensor in self._inputs.items() if tensor.requires_grad}
        return tensors | {name: grad for name, grad in grads.items() if grad is not None}


def _write(tensor: Any) -> bool:
    """Returns False where PyTorch refuses to, as elements of it share memory."""
    try:
        tensor.add_(1)
    except (RuntimeError, PropagationError):
        return False
    return True


def _compare(mesh: Mesh, plain: _Calls, compiled: _Calls) -> None:
    """To the last bit: both run the same operations on the same ranks."""
    eager, replayed = plain.everything(), compiled.everything()
    if eager.keys() != replayed.keys():
        raise Differs(f"compiled it has {sorted(replayed)}, and not {sorted(eager)}")
    pairs = zip(eager, gather(mesh, list(eager.values())), gather(mesh, list(replayed.values())), strict=True)
    for name, read_expected, read_actual in pairs:
        if eager[name].stride() != replayed[name].stride():
            raise Differs(f"{name} has strides {replayed[name].stride()} in place of {eager[name].stride()}")
        expected, actual = read_expected(), read_actual()
        if not torch.equal(expected.nan_to_num(), actual.nan_to_num()) or not torch.equal(
            expected.isnan(), actual.isnan()
        ):
            raise Differs(f"{name} is {actual.tolist()} in place of {expected.tolist()}")
