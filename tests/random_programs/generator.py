"""The making of a random program from a seed: line by line, each tried on local tensors first."""

import contextlib
import itertools
import re
import warnings
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.random_programs.draw import LIMIT, Draw, Scope
from tests.random_programs.local import Local, Unjudged, coarsest, expect, target
from tests.random_programs.mistakes import mistakes
from tests.random_programs.program import Head, Input, Line, Placements, Program, placements_text
from tests.random_programs.vocabulary import VOCABULARY

SIZES = (0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 6)
TRIES = 40  # of lines, until one fits
ERRORS = 0.03  # of lines are errors in local torch
SHOWN = 24  # tensors that a program has at its end, at most
_NAME = re.compile(r"\bv\d+\b")
_WEIGHTS = [weight for weight, _, _ in VOCABULARY]


def generate(seed: int, mesh: tuple[int, ...], device: str = "cpu") -> Program:
    """The program of this seed, of 4 to 10 lines, for ranks that compute on a device."""
    for attempt in itertools.count():
        with contextlib.suppress(Unjudged):
            return _Maker(seed, mesh, attempt, device).make()
    raise AssertionError


def placements_for(draw: Draw, mesh: tuple[int, ...], shape: tuple[int, ...], parts: float = 0.0) -> Placements:
    """One placement for each dimension of a mesh; `parts` says how likely one is of parts of a sum."""
    placements: list[Any] = []
    for _ in mesh:
        if draw.chance(parts):
            placements.append(Partial())
        elif shape and draw.chance(0.7):
            placements.append(Shard(draw.randrange(len(shape))))
        else:
            placements.append(Replicate())
    return tuple(placements)


class _Maker:
    def __init__(self, seed: int, mesh: tuple[int, ...], attempt: int, device: str) -> None:
        self._seed, self._mesh = seed, mesh
        self._device, self._mistakes = device, mistakes(device)
        self._draw = Draw(f"{seed} {attempt}")
        self._next = 0
        self._inputs = self._make_inputs()
        program = Program(seed, mesh, self._inputs, ())
        self._runs = [Local(program), Local(program, wide=True), Local(program, wide=True, noise=1)]
        self._rounding = coarsest(source.dtype for source in self._inputs)
        self._lines: list[Line] = []

    def make(self) -> Program:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(self._draw.randint(4, 10)):
                self._line()
            program = Program(self._seed, self._mesh, self._inputs, tuple(self._lines), self._heads())
            try:
                expect(program)
            except Unjudged:
                program = Program(self._seed, self._mesh, self._inputs, tuple(self._lines))
                expect(program)
            return program

    # -- inputs -----------------------------------------------------------------------------------------------------

    def _shape(self) -> tuple[int, ...]:
        ndim = self._draw.choice([0, 1, 1, 2, 2, 2, 2, 3, 3])
        return tuple(self._draw.choice(SIZES) for _ in range(ndim))

    def _make_inputs(self) -> tuple[Input, ...]:
        draw = self._draw
        first = self._shape()
        while draw.chance(0.9) and 0 in first:
            first = self._shape()
        shapes = [first, first if draw.chance(0.6) else self._shape()]
        kind = draw.random()
        if kind < 0.4 and first:
            shapes.append((draw.choice(SIZES), first[-1]))
        elif kind < 0.6:
            shapes.append(first[-1:])
        elif kind < 0.8:
            shapes.append(tuple(1 if draw.chance(0.4) else size for size in first))
        inputs = [
            self._input(shape, draw.choice([torch.float32] * 12 + [torch.float64, torch.bfloat16])) for shape in shapes
        ]
        if draw.chance(0.35):
            size = max(first[:1] or (1,))
            inputs.append(self._input((draw.randint(1, 4),), torch.int64, below=size or 1))
        if draw.chance(0.2):
            inputs.append(self._input(first, draw.choice([torch.int64, torch.int32, torch.bool])))
        return tuple(inputs)

    def _input(self, shape: tuple[int, ...], dtype: torch.dtype, below: int = 0) -> Input:
        draw = self._draw
        parts = 0.12 if dtype.is_floating_point else 0.0
        placements = placements_for(draw, self._mesh, shape, parts)
        seed = draw.randrange(1 << 16)
        return Input(self._name(), shape, dtype, seed, placements, dtype.is_floating_point and draw.chance(0.7), below)

    def _name(self) -> str:
        self._next += 1
        return f"v{self._next - 1}"

    # -- lines ------------------------------------------------------------------------------------------------------

    def _line(self) -> None:
        draw = self._draw
        scope = Scope(draw, self._runs[0].tensors)
        if draw.chance(ERRORS):
            text = draw.choice(self._mistakes)(draw, scope)
            if text and self._raises(text):
                self._lines.append(Line(text, (), tuple(names_in(text)), raises=True))
            elif text:
                self._again()
            return
        for _ in range(TRIES):
            _, _, function = draw.choices(VOCABULARY, _WEIGHTS)[0]
            text = function(draw, scope)
            if text and self._is_portable(text) and self._try_line(text, function.__name__):
                return

    def _is_portable(self, text: str) -> bool:
        """Whether a GPU computes what a CPU does: they make other whole numbers of NaN."""
        used = (self._runs[0].tensors[name] for name in names_in(text))
        return self._device == "cpu" or ".to(torch.int" not in text or all(bool(t.isfinite().all()) for t in used)

    def _raises(self, text: str) -> bool:
        """Whether it is an error in all runs."""
        for run in self._runs:
            try:
                run.run(text)
            except Exception:
                continue
            return False
        return True

    def _try_line(self, text: str, kind: str) -> bool:
        """Adds the line if it is usable; returns whether it did."""
        is_write = kind.startswith("writes")
        runs = self._runs
        makes: tuple[str, ...] = ()
        if not is_write:
            try:
                count = len(self._results(text))
            except Exception:
                return False
            if not 0 < count <= 5 or len(runs[0].tensors) + count > SHOWN:
                return False
            before = self._next
            makes = tuple(self._name() for _ in range(count))
            if "PLACED" in text:
                shape = tuple(self._results(text)[0].shape)
                placements = placements_for(self._draw, self._mesh, shape, 0.15 if self._parts_fit(text) else 0.0)
                text = text.replace("PLACED", placements_text(placements))
            text = f"{', '.join(makes)}{',' if self._is_many else ''} = {text}"
        else:
            saved = [self._snapshot(run) for run in runs]
        try:
            for run in runs:
                run.run(text, makes)
            self._judge(makes)
        except Exception as error:
            if is_write:
                if self._is_the_same(saved) and self._draw.chance(0.1) and self._raises(text) and _is_firm(error):
                    self._lines.append(Line(text, (), tuple(names_in(text)), raises=True))
                    return True
                self._again()
                return False
            self._next = before
            for run in runs:
                for name in makes:
                    run.tensors.pop(name, None)
            return False
        self._rounding = max(self._rounding, coarsest(runs[0].tensors[name].dtype for name in makes))
        self._lines.append(Line(text, makes, tuple(names_in(text))))
        return True

    def _parts_fit(self, text: str) -> bool:
        return self._results(text)[0].is_floating_point()

    def _results(self, text: str) -> list[torch.Tensor]:
        """The results of a line, not detached."""
        run = self._runs[0]
        code = text.replace("PLACED", "None")
        with torch.no_grad():
            result = eval(code, run.names, run.tensors)
        self._is_many = isinstance(result, list | tuple)
        tensors = list(result) if self._is_many else [result]
        if not all(isinstance(t, torch.Tensor) and t.numel() <= LIMIT and t.dim() <= 5 for t in tensors):
            raise Unjudged
        return tensors

    def _judge(self, makes: tuple[str, ...]) -> None:
        """Raises Unjudged unless all tensors can be judged, also those that a write has changed."""
        plain, wide, noisy = (run.tensors for run in self._runs)
        for name in makes or plain:
            target(plain[name], wide[name], noisy[name], self._rounding)

    def _snapshot(self, run: Local) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in run.tensors.values()]

    def _is_the_same(self, saved: list[list[torch.Tensor]]) -> bool:
        return all(
            tensor.shape == copy.shape and torch.equal(tensor.detach().nan_to_num(), copy.nan_to_num())
            for run, before in zip(self._runs, saved, strict=True)
            for tensor, copy in zip(run.tensors.values(), before, strict=True)
        )

    def _again(self) -> None:
        """The runs as they were before a write that is not used."""
        program = Program(self._seed, self._mesh, self._inputs, ())
        self._runs = [Local(program), Local(program, wide=True), Local(program, wide=True, noise=1)]
        for line in self._lines:
            for run in self._runs:
                try:
                    run.run(line.text)
                except Exception:
                    if not line.raises:
                        raise

    # -- gradients --------------------------------------------------------------------------------------------------

    def _heads(self) -> tuple[Head, ...]:
        draw = self._draw
        can = [name for name, t in self._runs[0].tensors.items() if _has_history(t)]
        if not can or draw.chance(0.1):
            return ()
        last = can[-1]
        picked = [name for name in can if name == last or draw.chance(0.4)]
        heads = []
        for name in picked:
            tensor = self._runs[0].tensors[name]
            shape = tuple(tensor.shape)
            placements = placements_for(draw, self._mesh, shape)
            heads.append(Head(name, shape, tensor.dtype, draw.randrange(1 << 16), placements))
        return tuple(heads)


def _has_history(tensor: torch.Tensor) -> bool:
    """Whether gradients flow back from a tensor. Views may be of no use any more, and say so then."""
    try:
        return tensor.requires_grad and tensor.grad_fn is not None
    except RuntimeError:
        return False


def names_in(text: str) -> list[str]:
    """The tensors that the text of a line reads."""
    target, equals, value = text.partition(" = ")
    return list(dict.fromkeys(_NAME.findall(value if equals and "[" not in target else text)))


def _is_firm(error: Exception) -> bool:
    """Whether sharded tensors are to raise it, too. Whether PyTorch notices that a tensor is copied to its own memory
    depends on the strides of dimensions of size 1, which mean nothing: handles read from a copy there."""
    return "single memory location" not in str(error)
