"""A program: inputs with placements, lines of source text, and the gradients that a backward pass begins with.

The text of a line runs, on local tensors and on sharded ones, and is printed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

Placements = tuple[Any, ...]
NAMES = "abc"  # of the dimensions of a mesh


@dataclass(frozen=True)
class Input:
    """A tensor that a program begins with; of `Partial` placements each rank has a part that is drawn by itself."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    placements: Placements
    grad: bool = False
    below: int = 0  # whole numbers from 0 to this, which index a dimension; 0 for any values

    @property
    def parts(self) -> int:
        """How many of its leading dimensions are summed to make it: one for each mesh dimension with parts."""
        return sum(placement.is_partial() for placement in self.placements)


@dataclass(frozen=True)
class Line:
    """One statement. `raises` says that local torch raises an error there."""

    text: str
    makes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    raises: bool = False


@dataclass(frozen=True)
class Head:
    """A result from which the backward pass goes out, with a gradient of these placements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    placements: Placements


@dataclass(frozen=True)
class Program:
    """A program for a mesh of the shape `mesh`, drawn with the seed `seed`."""

    seed: int
    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    heads: tuple[Head, ...] = ()

    @property
    def names(self) -> list[str]:
        """All tensors that it has at its end, in order."""
        return list(
            dict.fromkeys([*(source.name for source in self.inputs), *(n for line in self.lines for n in line.makes)])
        )


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype, below: int = 0) -> torch.Tensor:
    """Values that follow from the seed: floating ones differ from each other, and are multiples of a power of two.

    Sums of them are exact in any order.
    """
    count = torch.Size(shape).numel()
    draw = random.Random(seed)
    if below:
        return torch.tensor([draw.randrange(below) for _ in range(count)], dtype=dtype).view(shape)
    if dtype == torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(count)], dtype=dtype).view(shape)
    numbers = list(range(count))
    draw.shuffle(numbers)
    if not dtype.is_floating_point:
        return torch.tensor([n % 9 - 4 for n in numbers], dtype=dtype).view(shape)
    step = 1.0 if count < 4 else 0.5 if count < 16 else 0.125 if count < 64 else 0.03125
    return (
        torch.tensor([(2 * n - count + 1) / 2 * step + step / 4 for n in numbers], dtype=torch.float64)
        .to(dtype)
        .view(shape)
    )


def stacked(source: Input, mesh: tuple[int, ...]) -> torch.Tensor:
    """The values of an input; where ranks have parts, these along leading dimensions."""
    leading = [size for size, placement in zip(mesh, source.placements, strict=True) if placement.is_partial()]
    return values(source.seed, (*leading, *source.shape), source.dtype, source.below)


def stacked_placements(source: Input) -> Placements:
    """How the stacked values lie: cut along the leading dimensions where the input is in parts."""
    leading = iter(range(source.parts))
    return tuple(
        Shard(next(leading)) if p.is_partial() else Shard(p.dim + source.parts) if isinstance(p, Shard) else p
        for p in source.placements
    )


class Wide:
    """`torch`, in which all floating types have 64 bits."""

    float32 = float16 = bfloat16 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def placed_alike(tensor: torch.Tensor, placements: Any) -> torch.Tensor:
    """The result of another placement of a local tensor."""
    return tensor.clone()


def names_of_torch(torch_: Any, place: Callable[..., Any]) -> dict[str, Any]:
    """Names in the lines of a program, besides its tensors."""
    return {
        "torch": torch_,
        "F": torch.nn.functional,
        "place": place,
        "Shard": Shard,
        "Replicate": Replicate,
        "Partial": Partial,
    }


def placements_text(placements: Placements) -> str:
    return f"[{', '.join(_placement_text(placement) for placement in placements)}]"


def _placement_text(placement: Any) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Partial()" if placement.is_partial() else "Replicate()"


def paste_text(program: Program) -> str:
    """The program as text to paste into a cell: it prints the differences from local torch."""
    body, local, sharded = [], [], []
    for source in program.inputs:
        tensor = stacked(source, program.mesh)
        literal = f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})" + (
            "" if tensor.numel() else f".view({tuple(tensor.shape)})"
        )
        local.append(f"    {source.name}={literal},")
        placements = placements_text(stacked_placements(source))
        dims = f" {list(range(source.parts))}," if source.parts else ""
        sharded.append(f"    {source.name}=({placements},{dims}),")
    for head in program.heads:
        tensor = values(head.seed, head.shape, head.dtype)
        local.append(f"    grad_{head.name}=torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype}),")
        sharded.append(f"    grad_{head.name}=({placements_text(head.placements)},),")
    grads = [source.name for source in program.inputs if source.grad]
    for line in program.lines:
        if line.raises:
            body += [
                "try:",
                f"    {line.text}",
                "except Exception as error:",
                "    print('raised', type(error).__name__)",
            ]
            body += ["else:", "    print('raised no error')"]
        else:
            body.append(line.text)
    if program.heads:
        heads = ", ".join(head.name for head in program.heads)
        body.append(f"torch.autograd.backward([{heads}], [{', '.join(f'grad_{head.name}' for head in program.heads)}])")
    shown = [f"{name}={name}" for name in program.names] + (
        [f"grad_of_{name}={name}.grad" for name in grads] if program.heads else []
    )
    arguments = [source.name for source in program.inputs] + [f"grad_{head.name}" for head in program.heads]
    text = "\n".join(f"    {line}" for line in body)
    names = "abc"[: len(program.mesh)]
    return f"""# seed {program.seed}
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
import monarch
from monarch.distributed import Mesh

mesh = Mesh(shape={program.mesh}, mesh_dim_names={tuple(names)})
inputs = dict(
{chr(10).join(local)}
)
placements = dict(
{chr(10).join(sharded)}
)
needs_grad = {grads!r}

def program({", ".join(arguments)}, place):
{text}
    return dict({", ".join(shown)})

def make(name, mesh=None):
    value, (placed, *dims) = inputs[name].clone(), placements[name]
    tensor = value if mesh is None else monarch.distribute(value, mesh, placed)
    for summed in dims:
        tensor = tensor.sum(summed, dtype=tensor.dtype)
    return tensor.detach().requires_grad_() if name in needs_grad else tensor

expected = program(*(make(name) for name in inputs), lambda tensor, placed: tensor.clone())
results = program(*(make(name, mesh) for name in inputs), lambda tensor, placed: tensor.redistribute(placed).clone())
for name, target in expected.items():
    result = results[name]
    value = None if result is None else result.full_tensor()
    if (target is None) != (value is None) or target is not None and not (
        target.shape == value.shape and target.dtype == value.dtype
        and torch.allclose(target.detach().double(), value.double(), 1e-3, 1e-4, equal_nan=True)
    ):
        print(name, "should be", target, "and is", value, "placed", getattr(result, "placements", None), sep="\\n")
mesh.stop().get()
"""
