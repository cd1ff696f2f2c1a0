"""Every sample of every operation that PyTorch tests itself with, on sharded tensors, forward and backward.

`python -m tests.cluster.opinfo_all RESULTS [NAME,NAME… [SAMPLES [KIND]]]` runs all operations ("" for the names), or
these, on as many processes as there are cores, and appends a line of JSON for each to the file; those that it has
already are left out, so that a run that was ended goes on.

The ranks are threads (`threaded_ranks`): two in a row, and four in a square. Samples are tried again with their
dimensions written negative. A sample that hangs or ends its process costs that process alone.
"""

import contextlib
import faulthandler
import json
import logging
import os
import random
import select
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import MeshLayout, Placements
from tests.cluster import opinfo_cases as cases

LINE, SQUARE = MeshLayout((2,), ("data",)), MeshLayout((2, 2), ("data", "model"))
R, ROWS, COLUMNS, PARTS = Replicate(), Shard(0), Shard(1), Partial()
WAYS: dict[str, tuple[MeshLayout, Placements]] = {
    "whole": (LINE, (R,)),
    "rows": (LINE, (ROWS,)),
    "columns": (LINE, (COLUMNS,)),
    "parts": (LINE, (PARTS,)),
    "rows × columns": (SQUARE, (ROWS, COLUMNS)),
    "rows × rows": (SQUARE, (ROWS, ROWS)),
    "columns × parts": (SQUARE, (COLUMNS, PARTS)),
}
HANGS_S = 90  # seconds for one sample in all ways
AT_ONCE = 40  # operations of a process: it forgets no plan
WRONG_LIMIT = 5  # examples
NUMBERED = ("grid_sampler_2d", "grid_sampler_3d")  # their integers choose a mode; an unknown one gives anything


@dataclass
class Case:
    """The outcomes of one operation's samples in one layout."""

    right: int = 0
    untried: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """The outcomes of an operation by case, and how many of its samples were tried."""

    cases: dict[str, Case]
    tried: int = 0
    known: int = 0


@dataclass
class Expected:
    """What local tensors give: outputs, gradients, and the inputs that it changed."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    changed: dict[int, torch.Tensor]
    drawn: bool


@dataclass(frozen=True)
class Part:
    """Which samples: of which kinds of sizes, and how many per operation; 0 for all."""

    kinds: tuple[str, ...] = tuple(cases.SIZES)
    limit: int = 0

    def choose(self, samples: list[Any]) -> list[int]:
        """Indices of samples: the first with the most dimensions, up to three, and others, spread over all."""
        order = sorted(range(len(samples)), key=lambda index: -min(_dims(samples[index]), 3))
        count = min(self.limit or len(order), len(order))
        return [order[len(order) * index // count] for index in range(count)]


def _dims(sample: Any) -> int:
    return next((leaf.dim() for leaf in tree_leaves(sample.input) if _is_tensor(leaf)), 0)


class Bench:
    """The meshes of a process, and the runs of samples on them."""

    def __init__(self) -> None:
        from tests.cluster import threaded_ranks

        self._tools = threaded_ranks
        self._ranks = threaded_ranks.Ranks(SQUARE.size)
        self._streams = {layout: self._ranks.mesh(layout) for layout in (LINE, SQUARE)}

    def judge(self, op: Any, sample: Any) -> Expected:
        """Runs a sample on local tensors. Raises the operation's error."""

        def local(value: Any) -> Any:
            return value.detach().clone().requires_grad_(value.requires_grad) if _is_tensor(value) else value

        draws = cases.Draws()
        with draws:
            args, kwargs, result = _call(op, sample, local)
        outputs = cases.tensors_of(result)
        inputs = cases.tensors_of((args, kwargs))
        changed = {index: tensor.detach().clone() for index, tensor in enumerate(inputs) if tensor._version}
        gradients = list(cases.gradients_of(args, kwargs, result))
        return Expected([t.detach() for t in outputs], gradients, changed, draws.seen or "empty" in op.name)

    def outcome(self, op: Any, sample: Any, expected: Expected, layout: MeshLayout, place: Any) -> str:
        """ "ok", "WRONG …" for what differs from local tensors, or "refused …" with the error."""
        stream = self._streams[layout]
        stage = "forward"

        def sharded(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            return self._tools.distributed(stream, value, place(value)).requires_grad_(value.requires_grad)

        try:
            args, kwargs, result = _call(op, sample, sharded)
            outputs = cases.tensors_of(result)
            if len(outputs) != len(expected.outputs):
                return f"WRONG forward: {len(outputs)} tensors instead of {len(expected.outputs)}"
            stage = "backward"
            gradients = list(cases.gradients_of(args, kwargs, result))
            inputs = cases.tensors_of((args, kwargs))
            pairs = [("forward", local, remote) for local, remote in zip(expected.outputs, outputs, strict=True)]
            pairs += [("of an input", local, inputs[index]) for index, local in expected.changed.items()]
            for local, remote in zip(expected.gradients, gradients, strict=True):
                if (local is None) != (remote is None):
                    return "WRONG backward: a gradient is missing"
                if local is not None and remote is not None:
                    pairs.append(("backward", local, remote))
            handles = [remote for _, _, remote in pairs if isinstance(remote, MeshTensor)]
            stage = "run"
            values = iter(self._tools.fetched(self._ranks, stream, handles))
            largest = cases.largest(expected.gradients)
            for kind, local, remote in pairs:
                value = next(values) if isinstance(remote, MeshTensor) else remote
                scale = largest if kind == "backward" else 0.0
                if difference := cases.difference(local, value, expected.drawn, scale):
                    return f"WRONG {kind}: {difference}"
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            with contextlib.suppress(Exception):
                stream.synchronise()  # the failure belongs to this sample
            return f"refused {stage}: {type(error).__name__}: {lines[0][:300]}"
        return "ok"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _call(op: Any, sample: Any, convert: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    args = tree_map(convert, (sample.input, *sample.args))
    kwargs = tree_map(convert, sample.kwargs)
    torch.manual_seed(1)
    return args, kwargs, op(*args, **kwargs)


def place(value: torch.Tensor, placements: Placements) -> Placements:
    """The tensor's placements: replicated where it cannot be sharded or be a sum of parts."""
    summable = value.dtype.is_floating_point and value.dtype.itemsize > 1 and value.numel() > 0
    return tuple(
        p
        if (isinstance(p, Shard) and value.dim() > p.dim and value.shape[p.dim] > 1) or (p.is_partial() and summable)
        else R
        for p in placements
    )


def all_samples(op: Any, kind: str) -> list[Any]:
    """All of PyTorch's samples, in sizes of this kind, or else in its own sizes."""
    dtype = torch.float32
    if not op.supports_dtype(dtype, "cpu"):
        supported = sorted(op.supported_dtypes("cpu"), key=lambda d: (d is not torch.int64, str(d)))
        if not supported:
            return []
        dtype = supported[0]
    gradients = op.supports_autograd and dtype.is_floating_point

    def draw() -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        return list(op.sample_inputs("cpu", dtype, requires_grad=gradients))

    with cases.sizes(kind), contextlib.suppress(Exception):
        return [sample for sample in draw() if not _overruns(op, sample)]
    return [sample for sample in draw() if not _overruns(op, sample)]


def _overruns(op: Any, sample: Any) -> bool:
    """Whether the sample names more rows than it has: `_segment_reduce` reads and writes beyond its tensors."""
    if op.name != "_segment_reduce":
        return False
    rows = sample.input.size(sample.kwargs["axis"])
    lengths, offsets = sample.kwargs.get("lengths"), sample.kwargs.get("offsets")
    return bool((lengths.sum(-1) != rows).any() if lengths is not None else (offsets[..., -1] != rows).any())


def same_inputs(sample: Any) -> str:
    """What distinguishes samples, except the values of tensors."""

    def describe(value: Any) -> Any:
        return (tuple(value.shape), _strides(value), value.dtype, value.requires_grad) if _is_tensor(value) else value

    return repr(tree_map(describe, (sample.input, sample.args, sorted(sample.kwargs.items()))))


def _strides(value: torch.Tensor) -> Any:
    return value.stride() if value.layout == torch.strided else value.layout


def written_negative(op: Any, sample: Any, equal: Callable[[Any], bool]) -> Any | None:
    """The sample with each dimension written as a negative number; None if it has none.

    A number is a dimension if the result is the same with its negative.
    """
    from torch.testing._internal.opinfo.core import SampleInput

    first = next((leaf for leaf in tree_leaves(sample.input) if _is_tensor(leaf)), None)
    if first is None or op.name in NUMBERED:
        return None
    args, kwargs, changed = list(sample.args), dict(sample.kwargs), False

    def candidates(value: Any) -> Iterator[Any]:
        several = value if isinstance(value, (list, tuple)) else (value,)
        if not several or not all(type(number) is int and 0 <= number <= first.dim() for number in several):
            return
        for rank in dict.fromkeys((max(first.dim(), 1), first.dim() + 1)):
            if all(number < rank for number in several):
                moved = [number - rank for number in several]
                yield type(value)(moved) if isinstance(value, (list, tuple)) else moved[0]

    for holder, keys in ((args, range(len(args))), (kwargs, tuple(kwargs))):
        for key in keys:
            before = holder[key]  # type: ignore[index,call-overload]
            for value in candidates(before):
                holder[key] = value  # type: ignore[index,call-overload]
                if equal(SampleInput(sample.input, args=tuple(args), kwargs=kwargs)):
                    changed = True
                    break
                holder[key] = before  # type: ignore[index,call-overload]
    return SampleInput(sample.input, args=tuple(args), kwargs=dict(kwargs)) if changed else None


def try_operation(
    op: Any, bench: Bench, skipped: set[tuple[str, int]], begin: Callable[[str, int], None], part: "Part"
) -> Outcome:
    """Samples of an operation, in all ways."""
    result = Outcome({f"{kind} {word}": Case() for kind in part.kinds for word in WAYS})
    inputs: set[str] = set()
    for kind in part.kinds:
        by_inputs = {same_inputs(sample): sample for sample in all_samples(op, kind)}
        samples = [by_inputs[key] for key in by_inputs if key not in inputs]  # PyTorch's own sizes may have been tried
        inputs.update(by_inputs)
        for number in part.choose(samples):
            begin(kind, number)
            result.tried += 1
            if (kind, number) in skipped:
                result.cases[f"{kind} whole"].wrong.append(f"sample {number}: HUNG or ended the process")
                continue
            case_of = {word: result.cases[f"{kind} {word}"] for word in WAYS}
            _try_sample(op, samples[number], bench, case_of, f"sample {number}")
    result.known = len(inputs)
    return result


def _try_sample(op: Any, sample: Any, bench: Bench, case_of: dict[str, Case], title: str) -> None:
    try:
        expected = bench.judge(op, sample)
    except Exception:
        for case in case_of.values():
            case.untried += 1
        return
    tries = [("", sample, expected)]

    def equal(variant: Any) -> bool:
        try:
            _, _, result = _call(op, variant, lambda value: value.detach().clone() if _is_tensor(value) else value)
        except Exception:
            return False
        outputs = cases.tensors_of(result)
        return len(outputs) == len(expected.outputs) and not any(
            cases.difference(first, second, False) for first, second in zip(expected.outputs, outputs, strict=True)
        )

    negative = None if expected.drawn else written_negative(op, sample, equal)
    if negative is not None:
        with contextlib.suppress(Exception):
            tries.append((" with negative dimensions", negative, bench.judge(op, negative)))
    done: set[tuple[MeshLayout, tuple[Placements, ...]]] = set()
    tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_tensor(leaf)]
    for word, (layout, placements) in WAYS.items():
        placed = tuple(place(value, placements) for value in tensors)
        if (layout, placed) in done or (word != "whole" and all(p == R for shards in placed for p in shards)):
            continue  # the same as another layout
        done.add((layout, placed))
        case = case_of[word]
        for suffix, variant, reference in tries:
            outcome = bench.outcome(op, variant, reference, layout, lambda value, ps=placements: place(value, ps))
            if outcome == "ok":
                case.right += 1
            elif outcome.startswith("WRONG"):
                if len(case.wrong) < WRONG_LIMIT:
                    case.wrong.append(f"{title}{suffix}: {outcome} | {same_inputs(variant)[:300]}")
            else:
                case.refused[outcome] = case.refused.get(outcome, 0) + 1


def _of_process(names: list[str], skipped: dict[str, set[tuple[str, int]]], part: Part, out: int) -> None:
    """The work of one process: reports each sample that it begins, and the results."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def say(*message: Any) -> None:
        os.write(out, (json.dumps(message) + "\n").encode())

    bench = Bench()
    for op in cases.operations():
        name = cases.name_of(op)
        if name not in names:
            continue

        def begin(kind: str, number: int, name: str = name) -> None:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            say("begun", name, kind, number)

        started = time.process_time()
        result = try_operation(op, bench, skipped.get(name, set()), begin, part)
        faulthandler.cancel_dump_traceback_later()
        say("done", name, asdict(result), round(time.process_time() - started, 2))


class Child:
    """A process with its share of the operations, started again after a sample that ended it."""

    def __init__(self, names: list[str], part: Part) -> None:
        self.names, self._part = names, part
        self.skipped: dict[str, set[tuple[str, int]]] = {}
        self._begun: tuple[str, str, int] | None = None
        self._start()

    def _start(self) -> None:
        self.out, child_out = os.pipe()
        self._text = b""
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self.out)
                _of_process(self.names, self.skipped, self._part, child_out)
                os._exit(0)
            except BaseException:
                error = sys.exc_info()[1]
                print(f"{type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            finally:
                os._exit(4)
        os.close(child_out)

    def read(self) -> Iterator[tuple[str, Any, float]]:
        """The results since the last call."""
        data = os.read(self.out, 1 << 16)
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            kind, name, *rest = json.loads(line)
            if kind == "begun":
                self._begun = (name, rest[0], rest[1])
            else:
                self.names.remove(name)
                yield name, rest[0], rest[1]
        if not data:
            os.close(self.out)
            os.waitpid(self._pid, 0)
            if self.names:
                yield from self._go_on()

    def _go_on(self) -> Iterator[tuple[str, Any, float]]:
        """Restarts without the sample that ended it, or else without the operation."""
        name, size, number = self._begun or (self.names[0], "", -1)
        skipped = self.skipped.setdefault(name, set())
        if name not in self.names or (size, number) in skipped:
            name = next(iter(self.names))
            case = Case(wrong=["its samples ended the process"])
            self.names.remove(name)
            yield name, asdict(Outcome({f"{self._part.kinds[0]} whole": case})), 0.0
        skipped.add((size, number))
        if self.names:
            self._start()

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def run_all(names: Iterable[str], processes: int = 2, part: Part = Part()) -> Iterator[tuple[str, Any, float]]:
    """The results of these operations as they come: by case, and the seconds taken."""
    queue = deque(names)
    children: list[Child] = []
    try:
        while queue or children:
            while queue and len(children) < processes:
                children.append(Child([queue.popleft() for _ in range(min(AT_ONCE, len(queue)))], part))
            ready, _, _ = select.select([child.out for child in children], [], [])
            for child in list(children):
                if child.out in ready:
                    yield from child.read()
                    if not child.names:
                        children.remove(child)
    finally:
        for child in children:
            child.end()


def main(path: str, names: str = "", limit: str = "", kinds: str = "") -> None:
    """Appends the missing results to the file."""
    file = Path(path)
    stored = {json.loads(line)[0] for line in file.read_text().splitlines()} if file.exists() else set()
    targets = [cases.name_of(op) for op in cases.operations()]
    if names:
        targets = [name for name in targets if name in names.split(",")]
    start, wrong = time.time(), 0
    part = Part(tuple(kinds.split(",")) if kinds else tuple(cases.SIZES), int(limit or 0))
    processes = int(os.environ.get("PROCESSES", os.cpu_count() or 1))
    with file.open("a", buffering=1) as out:
        for name, result, took in run_all([name for name in targets if name not in stored], processes, part):
            out.write(json.dumps([name, result, took]) + "\n")
            for title, case in result["cases"].items():
                wrong += len(case["wrong"])
                for example in case["wrong"]:
                    print(f"{name} {title} {example}", flush=True)
    print(f"{len(targets)} operations, {wrong} wrong, {time.time() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:5])
