"""The making of a smaller program that fails alike: fewer lines, smaller sizes, simpler placements."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.distributed.tensor import Replicate

from tests.random_programs.generator import names_in
from tests.random_programs.local import Expected, Local, Unjudged, expect, run_line
from tests.random_programs.program import Head, Input, Line, Program

MOST = 250  # smaller programs that are tried
_PLACED = re.compile(r"\[((?:(?:Shard\(\d+\)|Replicate\(\)|Partial\(\))(?:, )?)+)\]")


def shrunk(program: Program, fails: Callable[[Program, Expected], bool], most: int = MOST) -> Program:
    """The smallest found. `fails` runs one, which local torch runs as its lines say."""
    tried = 0
    while True:
        for candidate in _smaller(program):
            try:
                fitted = _fitted(candidate)
                expected = expect(fitted)
            except Unjudged:
                continue
            tried += 1
            if tried > most:
                return program
            if fails(fitted, expected):
                program = fitted
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Those that are a little smaller, what saves most first."""
    yield from _with_less_backward(program)
    for at in reversed(range(len(program.lines))):
        yield from _without_line(program, at)
    used = {name for line in program.lines for name in line.reads} | {head.name for head in program.heads}
    for one in program.inputs:
        if one.name not in used:
            yield replace(program, inputs=tuple(other for other in program.inputs if other is not one))
    yield from _on_less_mesh(program)
    for one in program.inputs:
        yield from (_with_input(program, one, smaller) for smaller in _simpler(one))
    for size in sorted({size for one in program.inputs for size in one.shape}, reverse=True):
        for other in range(1, size):
            shapes = [tuple(other if n == size else n for n in one.shape) for one in program.inputs]
            inputs = tuple(
                replace(one, shape=shape, below=min(one.below, other) or one.below)
                for one, shape in zip(program.inputs, shapes, strict=True)
            )
            yield replace(program, inputs=inputs)
    for at, head in enumerate(program.heads):
        if not all(one.is_replicate() for one in head.placements):
            whole = replace(head, placements=(Replicate(),) * len(program.mesh))
            yield replace(program, heads=(*program.heads[:at], whole, *program.heads[at + 1 :]))
    for at, line in enumerate(program.lines):
        text = _PLACED.sub(lambda found: f"[{', '.join(['Replicate()'] * len(program.mesh))}]", line.text)
        if text != line.text:
            yield replace(program, lines=(*program.lines[:at], replace(line, text=text), *program.lines[at + 1 :]))


def _with_less_backward(program: Program) -> Iterator[Program]:
    if program.heads:
        yield replace(program, heads=())
    if len(program.heads) > 1:
        for head in program.heads:
            yield replace(program, heads=tuple(other for other in program.heads if other is not head))


def _without_line(program: Program, at: int) -> Iterator[Program]:
    """What it makes is made nowhere, or is something that it reads."""
    line = program.lines[at]
    before, after = program.lines[:at], program.lines[at + 1 :]
    read = {name for other in after for name in other.reads} & set(line.makes)
    heads = tuple(head for head in program.heads if head.name not in line.makes)
    if not read:
        yield replace(program, lines=(*before, *after), heads=heads)
        return
    for source in line.reads:
        renamed = list(after)
        for name in read:
            renamed = [_renamed(other, name, source) for other in renamed]
        yield replace(program, lines=(*before, *renamed), heads=heads)


def _renamed(line: Line, name: str, other: str) -> Line:
    text = re.sub(rf"\b{name}\b", other, line.text)
    return replace(line, text=text, reads=tuple(names_in(text)))


def _on_less_mesh(program: Program) -> Iterator[Program]:
    for dim, size in enumerate(program.mesh):
        if size > 2:
            mesh = (*program.mesh[:dim], 2, *program.mesh[dim + 1 :])
            yield replace(program, mesh=mesh)
        if len(program.mesh) > 1 and math.prod(program.mesh) > size:
            yield Program(
                program.seed,
                _without(program.mesh, dim),
                tuple(replace(one, placements=_without(one.placements, dim)) for one in program.inputs),
                tuple(
                    replace(line, text=_PLACED.sub(lambda found, dim=dim: _dropped(found, dim), line.text))
                    for line in program.lines
                ),
                tuple(replace(head, placements=_without(head.placements, dim)) for head in program.heads),
            )


def _without(values: tuple, dim: int) -> tuple:  # type: ignore[type-arg]
    return (*values[:dim], *values[dim + 1 :])


def _dropped(found: re.Match[str], dim: int) -> str:
    return f"[{', '.join(_without(tuple(found[1].split(', ')), dim))}]"


def _with_input(program: Program, one: Input, other: Input) -> Program:
    return replace(program, inputs=tuple(other if each is one else each for each in program.inputs))


def _simpler(one: Input) -> Iterator[Input]:
    whole = Replicate()
    if not all(placement.is_replicate() for placement in one.placements):
        yield replace(one, placements=(whole,) * len(one.placements))
        for dim, placement in enumerate(one.placements):
            if not placement.is_replicate():
                yield replace(one, placements=(*one.placements[:dim], whole, *one.placements[dim + 1 :]))
    if one.grad:
        yield replace(one, grad=False)
    if one.dtype in (torch.bfloat16, torch.float64):
        yield replace(one, dtype=torch.float32)


def _fitted(program: Program) -> Program:
    """With gradients of the shapes that results have now. Raises Unjudged where a line does not run."""
    run = Local(program)
    for line in program.lines:
        run_line(run, line.text, line.makes, line.raises)
    heads: list[Head] = []
    for head in program.heads:
        tensor = run.tensors.get(head.name)
        if tensor is None or not tensor.requires_grad:
            continue
        fits = all(placement.is_replicate() or placement.dim < tensor.dim() for placement in head.placements)
        placements = head.placements if fits else (Replicate(),) * len(program.mesh)
        heads.append(replace(head, shape=tuple(tensor.shape), dtype=tensor.dtype, placements=placements))
    return replace(program, heads=tuple(heads))
