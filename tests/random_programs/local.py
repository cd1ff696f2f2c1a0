"""The results of a program in local torch, and how far from them a right answer can be.

A program runs three times: as it is, with 64 bits in place of less, and so with inputs that differ a little. What the
first two differ by is rounding; what the last two do says how much a value depends on what comes before it. A line
that such differences change entirely (the order of values that are alike, a quotient of next to nothing) cannot be
judged, and is in no program.

A result that still differs is compared with more local runs, in which each operation sees numbers that are off by one
unit in the last place (`rounding_variants`). Elements in which these differ, and one of them has what was found, depend
on rounding alone, as the order of values that are equal but for rounding does: they cannot be judged.

Gradients that are nothing may be so because terms cancel, which they do to the last bit only in one order. How large
these terms were is seen in a fourth run, whose backward pass takes for each number one that differs a little.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.random_programs.program import Program, Wide, names_of_torch, placed_alike, stacked, values

NEAR = 1e-6  # how much inputs are changed, of each value
LARGEST = 1e6  # magnitudes that are let in
NOTHING = 2.0**-40  # of the terms that were summed: such a sum of them is nothing, but for rounding
VARIANTS = 64  # runs with other roundings, where a result differs
# Operations that choose among their numbers, and say which: of equal ones a GPU chooses others than a CPU.
_NAMES = "argmax argmin argsort cummax cummin kthvalue max median min mode nanmedian sort topk"
CHOOSE = frozenset(_NAMES.split())
MANY = 4  # values of a whole number in these: of a product, say, not all are seen in so few runs
SLACK = 64  # times the rounding of one operation
LOOSEST = 0.02  # of the magnitude of a tensor: what is less exact cannot be told from what is wrong
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
TYPES = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}


class Unjudged(Exception):
    """Nothing decides whether a result is right."""


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Local:
    def __init__(self, program: Program, *, wide: bool = False, noise: int = 0) -> None:
        self.dtype = torch.float64 if wide else torch.float32
        self._wide = wide
        self.names = names_of_torch(Wide() if wide else torch, placed_alike)
        self.tensors: dict[str, torch.Tensor] = {}
        for source in program.inputs:
            value = stacked(source, program.mesh)
            if source.parts:
                value = value.sum(list(range(source.parts)), dtype=value.dtype)
            value = self._cast(value.clone())  # no view of anything
            if noise and value.is_floating_point():
                generator = torch.Generator().manual_seed(noise + source.seed)
                value = value * (1 + NEAR * (2 * torch.rand(value.shape, generator=generator, dtype=value.dtype) - 1))
            self.tensors[source.name] = value.requires_grad_(source.grad)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(TYPES.get(tensor.dtype, tensor.dtype)) if self._wide else tensor

    def run(self, text: str, results: tuple[str, ...] = ()) -> None:
        """Runs one line. Raises its error."""
        code = compiled(text)
        torch._C._set_view_replay_enabled(False)  # operations on a mesh set it for their thread
        with by_default(self.dtype):
            exec(code, self.names, self.tensors)
        for name in results:
            if not isinstance(self.tensors[name], torch.Tensor):
                raise Unjudged

    def backward(self, program: Program) -> dict[str, torch.Tensor | None]:
        """Gradients by input."""
        torch._C._set_view_replay_enabled(False)
        gradients = [self._cast(values(head.seed, head.shape, head.dtype)) for head in program.heads]
        torch.autograd.backward([self.tensors[head.name] for head in program.heads], gradients)
        return {source.name: self.tensors[source.name].grad for source in program.inputs if source.grad}


class Shaken(TorchDispatchMode):
    """While it is entered, operations see other numbers than they are given: each differs by itself.

    They differ by up to `NEAR`, so that what comes out of terms that cancel is as large as these, times `NEAR`; or, if
    `by_rounding`, by at most one unit in the last place or the sign of a zero. With `untied`, operations that choose
    among their numbers see none that are equal.
    """

    def __init__(self, seed: int, *, by_rounding: bool = False, untied: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._untied, self._now = untied, ""
        self._generator = torch.Generator().manual_seed(seed)
        self._by_rounding = by_rounding

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The operation on such numbers; views, and what changes in place, are of the numbers as they are."""
        if func.is_view:
            return func(*args, **(kwargs or {}))
        named, self._now = func._schema.arguments, func._overloadpacket.__name__
        written = {argument.name for argument in named if argument.alias_info is not None}
        shaken = [
            value if argument.name in written else tree_map(self._shake, value)
            for argument, value in zip(named, args, strict=False)
        ]
        options = {
            name: value if name in written else tree_map(self._shake, value) for name, value in (kwargs or {}).items()
        }
        return func(*shaken, **options)

    def _shake(self, value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if self._by_rounding:
            steps = torch.randint(-1, 2, value.shape, generator=self._generator).to(value.dtype)
            signs = 1 - 2 * torch.randint(0, 2, value.shape, generator=self._generator).to(value.dtype)
            least = torch.finfo(value.dtype).tiny if self._untied and self._now in CHOOSE else 0.0
            return torch.where(
                value == 0, value * signs + least * steps, value * (1 + ROUNDING.get(value.dtype, 0.0) * steps)
            )
        return value * (1 + NEAR * (2 * torch.rand(value.shape, generator=self._generator, dtype=value.dtype) - 1))


_compiled: dict[str, Any] = {}


def compiled(text: str, filename: str = "<line>") -> Any:
    code = _compiled.get(text)
    if code is None:
        if len(_compiled) > 20_000:
            _compiled.clear()
        code = _compiled[text] = compile(text, filename, "exec")
    return code


@dataclass(frozen=True)
class Target:
    """An expected value, and how much each of its elements may differ from it. Whole numbers may not."""

    value: torch.Tensor
    within: float


def target(plain: torch.Tensor, wide: torch.Tensor, noisy: torch.Tensor, rounding: float, terms: float = 0.0) -> Target:
    """From the three runs. Raises Unjudged where they differ by more than rounding.

    `terms` is how large the numbers were that were summed to it, where that is known: where it is nothing, rounding is
    of these.
    """
    if not plain.is_floating_point():
        if not (torch.equal(plain, wide) and torch.equal(plain, noisy)):
            raise Unjudged
        return Target(plain, 0.0)
    if not plain.numel():
        return Target(plain, 0.0)
    base, true, shifted = plain.detach().double(), wide.detach().double(), noisy.detach().double()
    finite = true.isfinite()
    if not finite.all():
        for values in (base, shifted):
            if not torch.equal(values.nan_to_num(0.5, 2.0, -2.0)[~finite], true.nan_to_num(0.5, 2.0, -2.0)[~finite]):
                raise Unjudged
        base, true, shifted = base[finite], true[finite], shifted[finite]
        if not true.numel():
            return Target(plain, 0.0)
    scale, rounded, moved = (values.abs().max().item() for values in (true, base - true, shifted - true))
    if scale <= NOTHING * terms:
        scale = terms
    within = 8 * rounded + SLACK * rounding * (moved / NEAR + scale)
    if not (scale < LARGEST and within <= max(LOOSEST * scale, 1e-12)):
        raise Unjudged
    return Target(plain, within)


@dataclass(frozen=True)
class Expected:
    """The expected results of a program: its tensors at the end, and gradients; None where it has none."""

    values: dict[str, Target]
    gradients: dict[str, Target | None]
    backward_raises: str = ""


def expect(program: Program) -> Expected:
    """The results of local torch. Raises Unjudged if the program does not run as its lines say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [Local(program), Local(program, wide=True), Local(program, wide=True, noise=1)]
        rounding = coarsest(source.dtype for source in program.inputs)
        for line in program.lines:
            for run in runs:
                run_line(run, line.text, line.makes, line.raises)
            rounding = max(rounding, coarsest(t.dtype for t in runs[0].tensors.values()))
        targets: dict[str, Target] = {}
        gradients: dict[str, Target | None] = {}
        raised = ""
        for name in program.names:
            targets[name] = target(*(run.tensors[name] for run in runs), rounding)
        if program.heads:
            raised = ""
            run_gradients: list[dict[str, torch.Tensor | None]] = []
            for run in runs:
                try:
                    run_gradients.append(run.backward(program))
                except RuntimeError as error:
                    raised = raised or type(error).__name__
            if raised:
                if run_gradients:
                    raise Unjudged
            else:
                terms = terms_of_gradients(program, run_gradients[1])
                for name, plain in run_gradients[0].items():
                    rest = [grads[name] for grads in run_gradients[1:]]
                    if plain is None or None in (type(grad) if grad is None else 0 for grad in rest):
                        gradients[name] = None
                    else:
                        gradients[name] = target(plain, *rest, rounding, terms.get(name, 0.0))  # type: ignore[arg-type]
        return Expected(targets, gradients, raised)


def terms_of_gradients(program: Program, wide: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """How large the numbers were that cancelled, for gradients that are nothing or next to it."""
    small = {name: grad for name, grad in wide.items() if grad is not None and grad.numel() and grad.abs().max() < NEAR}
    if not small:
        return {}
    run = Local(program, wide=True)
    for line in program.lines:
        run_line(run, line.text, line.makes, line.raises)
    with Shaken(program.seed):
        shaken = run.backward(program)
    moved = {name: (shaken[name] - grad).abs().max().item() for name, grad in small.items()}  # type: ignore[operator]
    return {name: apart / NEAR for name, apart in moved.items()}


def rounding_variants(program: Program, *, untied: bool = False) -> list[dict[str, torch.Tensor]]:
    """The results of local runs that differ in their rounding alone: tensors by name, gradients by name + ".grad".

    With `untied` they differ in what is chosen among equal numbers, too.
    """
    runs: list[dict[str, torch.Tensor]] = []
    for number in range(VARIANTS):
        run = Local(program)
        with warnings.catch_warnings(), contextlib.suppress(Unjudged, RuntimeError):
            warnings.simplefilter("ignore")
            with Shaken(program.seed + number, by_rounding=True, untied=untied):
                for line in program.lines:
                    run_line(run, line.text, line.makes, line.raises)
                gradients: dict[str, torch.Tensor | None] = {}
                with contextlib.suppress(RuntimeError):  # an error that the program makes on purpose
                    gradients = run.backward(program) if program.heads else {}
            results = {name: run.tensors[name].detach() for name in program.names}
            results |= {f"{name}.grad": grad for name, grad in gradients.items() if grad is not None}
            runs.append(results)
    return runs


def explained_by_rounding(result: torch.Tensor, variants: Sequence[torch.Tensor], within: float) -> torch.Tensor:
    """Elements in which results of other roundings differ from each other, and one of them is what was found.

    Of floating values, those next to their range; of whole numbers that take many values, those in their range.
    """
    if not variants or any(variant.shape != result.shape for variant in variants):
        return torch.zeros(result.shape, dtype=torch.bool)
    stacked = torch.stack(list(variants))
    if not result.is_floating_point():
        low, high = stacked.amin(0), stacked.amax(0)
        count = 1 + (stacked.sort(0).values.diff(dim=0) != 0).sum(0)
        same = (stacked == result).any(0) | ((count > MANY) & (low <= result) & (result <= high))
        return (count > 1) & same
    are_nan = stacked.isnan()
    stacked, value = stacked.double().nan_to_num(), result.double()
    low, high = stacked.amin(0), stacked.amax(0)
    margin = within + (high - low)
    differ = (high - low > within / 8) | (are_nan.any(0) & ~are_nan.all(0))
    return differ & torch.where(value.isnan(), are_nan.any(0), (low - margin <= value) & (value <= high + margin))


def run_line(run: Local, text: str, makes: tuple[str, ...], raises: bool) -> None:
    """A line in one of the runs, which must raise if it says so, and only then."""
    try:
        run.run(text, makes)
    except Unjudged:
        raise
    except Exception as error:
        if not raises:
            raise Unjudged from error
        return
    if raises:
        raise Unjudged


def steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of dimensions where these say anything."""
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step for size, step in sized if size > 1) if tensor.numel() else ()


def imagined_steps(program: Program, name: str) -> tuple[int, ...]:
    """Strides that PyTorch's fake tensors have at the end of a program; for a few operations these are others."""
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
        run = Local(program)
        for line in program.lines:
            if not line.raises:
                run.run(line.text, line.makes)
        return steps(run.tensors[name])
    return ()


def coarsest(dtypes: Any) -> float:
    return max((ROUNDING.get(dtype, 2.0**-50) for dtype in dtypes), default=2.0**-50)
