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


def shrink_program(program: Program, fails: Callable[[Program, Expected], bool], most: int = MOST) -> Program:
    """The smallest found. `fails` runs one, which local torch runs as its lines say."""
    tried = 0
    while True:
        for candidate in _smaller(program):
            try:
                fitted = _fit(candidate)
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
    """Programs that are a little smaller, the largest saving first."""
    yield from _with_less_backward(program)
    for index in reversed(range(len(program.lines))):
        yield from _without_line(program, index)
    used = {name for line in program.lines for name in line.reads} | {head.name for head in program.heads}
    for source in program.inputs:
        if source.name not in used:
            yield replace(program, inputs=tuple(item for item in program.inputs if item is not source))
    yield from _on_less_mesh(program)
    for source in program.inputs:
        yield from (_with_input(program, source, smaller) for smaller in _simpler(source))
    for size in sorted({size for source in program.inputs for size in source.shape}, reverse=True):
        for less in range(1, size):
            shapes = [tuple(less if n == size else n for n in source.shape) for source in program.inputs]
            inputs = tuple(
                replace(source, shape=shape, below=min(source.below, less) or source.below)
                for source, shape in zip(program.inputs, shapes, strict=True)
            )
            yield replace(program, inputs=inputs)
    for index, head in enumerate(program.heads):
        if not all(placement.is_replicate() for placement in head.placements):
            replicated = replace(head, placements=(Replicate(),) * len(program.mesh))
            yield replace(program, heads=(*program.heads[:index], replicated, *program.heads[index + 1 :]))
    for i, line in enumerate(program.lines):
        text = _PLACED.sub(lambda match: f"[{', '.join(['Replicate()'] * len(program.mesh))}]", line.text)
        if text != line.text:
            yield replace(program, lines=(*program.lines[:i], replace(line, text=text), *program.lines[i + 1 :]))


def _with_less_backward(program: Program) -> Iterator[Program]:
    if program.heads:
        yield replace(program, heads=())
    if len(program.heads) > 1:
        for head in program.heads:
            yield replace(program, heads=tuple(item for item in program.heads if item is not head))


def _without_line(program: Program, index: int) -> Iterator[Program]:
    """Its results are left out, or replaced by one of its inputs."""
    line = program.lines[index]
    before, after = program.lines[:index], program.lines[index + 1 :]
    read = {name for follower in after for name in follower.reads} & set(line.makes)
    heads = tuple(head for head in program.heads if head.name not in line.makes)
    if not read:
        yield replace(program, lines=(*before, *after), heads=heads)
        return
    for source in line.reads:
        renamed = list(after)
        for name in read:
            renamed = [_rename(follower, name, source) for follower in renamed]
        yield replace(program, lines=(*before, *renamed), heads=heads)


def _rename(line: Line, name: str, replacement: str) -> Line:
    text = re.sub(rf"\b{name}\b", replacement, line.text)
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
                tuple(replace(source, placements=_without(source.placements, dim)) for source in program.inputs),
                tuple(
                    replace(line, text=_PLACED.sub(lambda match, dim=dim: _drop(match, dim), line.text))
                    for line in program.lines
                ),
                tuple(replace(head, placements=_without(head.placements, dim)) for head in program.heads),
            )


def _without(values: tuple, dim: int) -> tuple:  # type: ignore[type-arg]
    return (*values[:dim], *values[dim + 1 :])


def _drop(match: re.Match[str], dim: int) -> str:
    return f"[{', '.join(_without(tuple(match[1].split(', ')), dim))}]"


def _with_input(program: Program, source: Input, replacement: Input) -> Program:
    return replace(program, inputs=tuple(replacement if item is source else item for item in program.inputs))


def _simpler(source: Input) -> Iterator[Input]:
    replicate = Replicate()
    if not all(placement.is_replicate() for placement in source.placements):
        yield replace(source, placements=(replicate,) * len(source.placements))
        for dim, placement in enumerate(source.placements):
            if not placement.is_replicate():
                yield replace(source, placements=(*source.placements[:dim], replicate, *source.placements[dim + 1 :]))
    if source.grad:
        yield replace(source, grad=False)
    if source.dtype in (torch.bfloat16, torch.float64):
        yield replace(source, dtype=torch.float32)


def _fit(program: Program) -> Program:
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
