"""A program on a mesh, and the judgement of it."""

import itertools
import linecache
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import monarch_nb
from monarch_nb.distributed import Mesh, MeshTensor
from monarch_nb.supervision import DeviceMeshError, SupervisionError
from monarch_nb.tensor.propagation import PropagationError
from tests.random_programs.gather import ShardsDiffer, gather
from tests.random_programs.local import (
    Expected,
    Target,
    expect,
    explained_by_rounding,
    imagined_steps,
    rounding_variants,
    steps,
)
from tests.random_programs.program import Input, Program, names_of_torch, stacked, stacked_placements, values

UNKNOWN = "not known"  # a view that autograd cannot follow any more
EQUAL, REFUSED, WRONG, HUNG, DEAD = "equal", "refused", "wrong", "hung", "dead"
UNJUDGED = "unjudged"  # a result differs, in elements alone that depend on rounding
PATIENCE = 240  # seconds for a program, which takes a tenth of one where nothing else runs
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: `kind` is one of the six, `reason` groups it with others, `text` has all of it."""

    kind: str
    reason: str = ""
    text: str = ""


class Hung(BaseException):
    """The time is over."""


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Raises Hung in the main thread once so many seconds have gone by."""

    def expired(*_: Any) -> None:
        raise Hung

    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def judge_program(program: Program, mesh: Mesh, expected: Expected | None = None, patience: int = PATIENCE) -> Outcome:
    """Runs a program on a mesh of its shape. Raises Unjudged where local torch does not run it as its lines say.

    After one that hung, or in which a process died, the mesh is of no use any more.
    """
    expected = expected or expect(program)
    run = _Run(program, mesh)
    try:
        with bounded(patience), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run.judge(expected)
    except Hung:
        return Outcome(HUNG, "hung", f"no end after {patience} s, {run.site}")
    except (DeviceMeshError, SupervisionError) as error:
        return Outcome(DEAD, type(error).__name__, f"{run.site}: {error}")


def distributed(source: Input, program: Program, mesh: Mesh) -> Any:
    """An input of a program on its mesh."""
    tensor = monarch_nb.distribute(stacked(source, program.mesh), mesh, stacked_placements(source))
    if source.parts:
        tensor = tensor.sum(list(range(source.parts)), dtype=source.dtype)
        if tensor.placements != source.placements:
            tensor = tensor.redistribute(source.placements)  # type: ignore[attr-defined]
    return tensor.detach().requires_grad_() if source.grad else tensor


class Differs(Exception):
    """A difference, which the text describes."""


class _Run:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self._program, self._mesh = program, mesh
        self._file = f"<program {next(_numbers)}>"
        self._texts = [line.text for line in program.lines]
        if program.heads:
            heads = ", ".join(head.name for head in program.heads)
            self._texts.append(f"torch.autograd.backward([{heads}], gradients)")
        self.site = "at its inputs"
        self._tensors: dict[str, Any] = {}
        self._names = names_of_torch(torch, lambda tensor, placements: tensor.redistribute(placements).clone())
        self._unjudged = ""
        self._variants: list[dict[str, torch.Tensor]] | None = None

    def judge(self, expected: Expected) -> Outcome:
        program = self._program
        linecache.cache[self._file] = (0, None, [text + "\n" for text in self._texts], self._file)
        try:
            for source in program.inputs:
                self._tensors[source.name] = distributed(source, program, self._mesh)
            for number, line in enumerate(program.lines):
                self._line(number, line.raises)
            gradients: dict[str, Any] = {}
            if program.heads:
                self._names["gradients"] = [
                    monarch_nb.distribute(values(head.seed, head.shape, head.dtype), self._mesh, head.placements)
                    for head in program.heads
                ]
                self._line(len(program.lines), bool(expected.backward_raises))
                if not expected.backward_raises:
                    gradients = {leaf.name: self._tensors[leaf.name].grad for leaf in program.inputs if leaf.grad}
            self.site = "at its end"
            self._compare(expected, gradients)
        except PropagationError as error:
            return self._refusal(error)
        except (Differs, ShardsDiffer) as error:
            return Outcome(WRONG, grouped(str(error)), f"{self.site}: {error}")
        except (DeviceMeshError, SupervisionError):
            raise
        except Exception as error:
            return Outcome(
                WRONG, f"{type(error).__name__}: {grouped(str(error))}", f"{self.site}: {type(error).__name__}: {error}"
            )
        finally:
            linecache.cache.pop(self._file, None)
        if self._unjudged:
            return Outcome(UNJUDGED, grouped(self._unjudged), f"{self.site}: {self._unjudged}")
        return Outcome(EQUAL)

    def _line(self, number: int, raises: bool) -> None:
        text = self._texts[number]
        self.site = f"at line {number + 1}, {text}"
        code = compile("\n" * number + text, self._file, "exec")
        if not raises:
            exec(code, self._names, self._tensors)
            return
        try:
            exec(code, self._names, self._tensors)
            self._mesh.synchronise()
        except (DeviceMeshError, SupervisionError):
            raise
        except Exception:
            return
        raise Differs("local torch raises an error here, and sharded tensors do not")

    def _refusal(self, error: PropagationError) -> Outcome:
        """It must name the line and the remedy."""
        line = f"{self._file}:"
        reason = f"{type(error).__name__} {error.operation}: {error.reason}"
        if line not in str(error):
            return Outcome(WRONG, f"refused without a line: {reason}", f"{self.site}: {error}")
        if not error.instead:
            return Outcome(WRONG, f"refused without a remedy: {reason}", f"{self.site}: {error}")
        return Outcome(REFUSED, grouped(reason), f"{self.site}: {error}")

    def _compare(self, expected: Expected, gradients: dict[str, Any]) -> None:
        compared: list[tuple[str, Target, MeshTensor]] = []
        for name, target in expected.values.items():
            compared.append((name, target, self._tensors[name]))
        for name, grad in gradients.items():
            target_or_none = expected.gradients[name]
            if (target_or_none is None) != (grad is None):
                raise Differs(f"the gradient of {name} is {'there' if target_or_none is None else 'missing'}")
            if target_or_none is not None:
                compared.append((f"{name}.grad", target_or_none, grad))
        for name, target, tensor in compared:
            _compare_facts(name, target.value, tensor, lambda name=name: imagined_steps(self._program, name))
        for (name, target, handle), read_value in zip(
            compared, gather(self._mesh, [tensor for _, _, tensor in compared]), strict=True
        ):
            try:
                value = read_value()
            except ShardsDiffer as error:
                raise Differs(f"{self._subject(name)}\n{name} is {error}, placed {handle.placements}") from None
            difference = off(target, value)
            if not difference:
                continue
            text = f"{self._subject(name)}\n{name} is {difference}, placed {handle.placements}"
            if off(target, value, but=self._explained_by_rounding(name, target, value)):
                raise Differs(text)
            self._unjudged = self._unjudged or text

    def _subject(self, name: str) -> str:
        return "a gradient is wrong" if name.endswith(".grad") else f"value of {self._line_of(name)} is wrong"

    def _explained_by_rounding(self, name: str, target: Target, value: torch.Tensor) -> torch.Tensor:
        if self._variants is None:
            self._variants = rounding_variants(self._program, untied=self._mesh.stream.layout.device != "cpu")
        variants = [variant[name] for variant in self._variants if name in variant]
        return explained_by_rounding(value, variants, target.within)

    def _line_of(self, name: str) -> str:
        return next((line.text for line in self._program.lines if name in line.makes), "an input")


def _compare_facts(name: str, target: torch.Tensor, handle: Any, imagined: Callable[[], tuple[int, ...]]) -> None:
    """Strides are those of local tensors, or what PyTorch's own fake tensors take them for (`imagined`)."""
    if not isinstance(handle, MeshTensor):
        raise Differs(f"{name} is a {type(handle).__name__}")
    facts: dict[str, Callable[[torch.Tensor], object]] = {
        "shape": lambda t: tuple(t.shape),
        "dtype": lambda t: t.dtype,
        "requires_grad": lambda t: t.requires_grad,
    }
    if not name.endswith(".grad"):
        facts["stride"] = steps
        facts["is_leaf"] = lambda t: t.is_leaf
    for fact, of in facts.items():
        local, value = _fact(of, target), _fact(of, handle)
        if local == value or (fact == "is_leaf" and local == UNKNOWN) or (fact == "stride" and value == imagined()):
            continue
        raise Differs(f"{name} has {fact} {value} in place of {local}")


def _fact(of: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> object:
    """Of views that are of no use any more, autograd raises an error."""
    try:
        return of(tensor)
    except RuntimeError:
        return UNKNOWN


def off(target: Target, actual: torch.Tensor, but: torch.Tensor | None = None) -> str:
    """The difference of a value; "" if it is right. Elements in `but` do not count."""
    value = target.value.detach()
    if but is not None:
        actual = torch.where(but, value, actual)
    if not value.is_floating_point():
        if torch.equal(value, actual):
            return ""
        return f"{actual.tolist()} in place of {value.tolist()}"
    reference, result = value.double(), actual.double()
    special = ~reference.isfinite()
    same = reference.isnan() == result.isnan()
    within = (reference - result).abs() <= target.within
    right = torch.where(special, same & ((reference == result) | reference.isnan()), within)
    if bool(right.all()):
        return ""
    apart = (reference - result).abs()[~right].nan_to_num(float("inf")).max().item()
    return f"off by {apart:.3g}, {target.within:.3g} would be rounding: {actual.tolist()} in place of {value.tolist()}"


def grouped(text: str) -> str:
    """A text without the parts that belong to one program only."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    first = re.sub(r"<program \d+>:\d+", "<line>", first)
    first = re.sub(r"\bv\d+\b", "v", first)
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", first)[:160]
