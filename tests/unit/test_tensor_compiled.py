"""The pure part of a compiled step: commands renamed to registers, two runs compared, and the code that workers run."""

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from monarch_nb.tensor.commands import Define, Making
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import Issued, Program, Sent, difference, renamed
from monarch_nb.tensor.compiled.source import source_of
from monarch_nb.tensor.propagation import MeshLayout, Meta, Propagator, leaves, overload
from monarch_nb.tensor.seeds import seed_after, seed_number

pytestmark = pytest.mark.timeout(60)
aten = torch.ops.aten
LINE = MeshLayout((1,), ("data",))


def meta(*shape: int) -> Meta:
    return Meta.of(LINE, shape, torch.float32, (Replicate(),))


class Step:
    """Records operations as a stream would see them."""

    def __init__(self, first: int) -> None:
        self.issued: list[Issued] = []
        self.metas: dict[int, Meta] = {}
        self._next = first
        self._propagator = Propagator(LINE)

    def define(self, number: int, *shape: int) -> int:
        self.metas[number] = meta(*shape)
        return number

    def __call__(self, func: Any, *args: Any, drawn: int = 0) -> Any:
        numbers = [arg for arg in args if type(arg) is int]
        plan, _, floats = self._propagator.plan(
            func, tuple(self.metas[arg] if type(arg) is int else arg for arg in args)
        )
        results = tuple(range(self._next, self._next + len(plan.made)))
        self._next += len(results)
        self.metas.update(zip(results, plan.made, strict=True))
        action = Define(plan.number, plan.operation, plan.program, len(floats), plan.made, plan.writes)
        self.issued.append(Issued(action, tuple(numbers), tuple(floats), results, drawn))  # type: ignore[arg-type]
        return results[0] if len(results) == 1 else results

    def program(self, inputs: tuple[int, ...], results: tuple[int, ...]) -> tuple[Program, tuple[int, ...]]:
        written = {step.tensors[index] for step in self.issued for index in step.action.writes}  # type: ignore[union-attr]
        return renamed(self.issued, inputs, results, self.metas, written)


def line(first: int, x: int, w: int, factor: float = 2.0) -> tuple[Program, tuple[int, ...]]:
    """x @ w * factor + w, added to w in place."""
    step = Step(first)
    step.define(x, 3, 3)
    step.define(w, 3, 3)
    product = step(aten.mm.default, x, w)
    scaled = step(aten.mul.Tensor, product, factor)
    total = step(aten.add.Tensor, scaled, w)
    step(aten.add_.Tensor, w, total)
    return step.program((x,), (total,))


def runnable(program: Program) -> Any:
    """The function of a program whose tensors are whole."""
    source = source_of(program)
    names: dict[str, Any] = {"leaves": leaves}
    for name, constant in source.constants.items():
        value: Any = constant.value
        names[name] = overload(value) if constant.kind == "operation" else value
        if constant.kind == "seed":
            names[name] = lambda seed, drawn: torch.manual_seed(seed_after(seed, drawn))
    exec(source.text, names)
    return names["run"]


def test_tensors_become_registers_whatever_their_numbers_are() -> None:
    program, fixed = line(100, 7, 5)
    again, other_fixed = line(900, 61, 5)
    assert [operation.tensors for operation in program.operations] == [(0, 1), (2,), (3, 1), (1, 4)]
    assert (program.results, fixed, program.written) == ((4,), (5,), (1,))
    assert difference(program, again) is None
    assert other_fixed == fixed


def test_an_argument_that_is_given_twice_is_where_it_came_first() -> None:
    step = Step(10)
    x = step.define(1, 2)
    total = step(aten.add.Tensor, x, x)
    program, _ = step.program((x, x), (total,))
    assert [operation.tensors for operation in program.operations] == [(0, 0)]
    assert len(program.inputs) == 2


def test_numbers_that_change_are_scalar_slots_and_the_only_difference() -> None:
    change = difference(line(10, 1, 2, 2.0)[0], line(10, 1, 2, 2.5)[0])
    assert change is not None
    assert change.scalars == ((1, 0, 2.0, 2.5),)
    assert change.text == "aten.mul.Tensor takes the number 2.0 before and 2.5 now"


def test_another_operation_is_described_by_its_name_and_index() -> None:
    step = Step(10)
    step.define(1, 3, 3)
    step.define(2, 3, 3)
    step(aten.mm.default, 1, 2)
    shorter, _ = step.program((1,), ())
    change = difference(line(10, 1, 2)[0], shorter)
    assert change is not None
    assert change.text == "4 operations before and 1 now: aten.mul.Tensor no longer"
    step(aten.add.Tensor, 1, 2)
    change = difference(line(10, 1, 2)[0], step.program((1,), ())[0])
    assert change is not None
    assert (change.index, change.text) == (1, "aten.mul.Tensor before and aten.add.Tensor now")


def test_a_local_tensor_that_is_sent_is_a_constant() -> None:
    def sending(value: float) -> Program:
        return renamed([Issued(Sent(torch.full((2,), value), meta(2)), results=(4,))], (), (), {}, ())[0]

    assert difference(sending(1.0), sending(1.0)) is None
    change = difference(sending(1.0), sending(2.0))
    assert change is not None
    assert "a local tensor of shape (2,) sent to the mesh" in change.text


def test_tensors_made_of_nothing_are_compared_by_arguments() -> None:
    def making(number: int, value: float) -> Program:
        action = Making(number, "aten.full.default", ((2,), value), {}, meta(2), True)
        return renamed([Issued(action, results=(4,))], (), (), {}, ())[0]

    assert difference(making(-16, 1.0), making(-17, 1.0)) is None
    assert difference(making(-16, 1.0), making(-16, 2.0)) is not None


def test_generated_code_gives_what_the_operations_give_and_writes_in_place() -> None:
    program, _ = line(100, 7, 5)
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    expected = x @ w * 2.0 + w
    [total] = runnable(program)([x, weights := w.clone()], 0)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weights, w + expected)


def test_registers_go_with_their_last_use() -> None:
    source = source_of(line(100, 7, 5)[0])
    assert [code.partition("; ")[2] for code in source.lines] == ["del r0", "del r2", "del r3", "del r1"]
    assert source.text.splitlines()[source.first_line - 1].strip() == source.lines[0]


def test_lists_and_several_results_are_taken_apart() -> None:
    step = Step(10)
    x = step.define(1, 4, 2)
    first, second = step(aten.split_with_sizes.default, x, [1, 1], True)  # numbers of type int are tensors here
    values, _ = step(aten.max.dim, first, True)
    program, _ = step.program((x,), (second, values))
    inputs = torch.randn(4, 2)
    second_result, values_result = runnable(program)([inputs], 0)
    assert torch.equal(second_result, inputs[:, 1:])
    assert torch.equal(values_result, inputs[:, :1].max(1).values)


class ShardedStep:
    """Records operations on tensors of two ranks."""

    def __init__(self) -> None:
        self.layout = MeshLayout((2,), ("data",))
        self.issued: list[Issued] = []
        self.metas: dict[int, Meta] = {}
        self._propagator = Propagator(self.layout)

    def define(self, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        number = len(self.metas) + 1
        self.metas[number] = Meta.of(self.layout, shape, dtype, (Shard(0),))
        return number

    def __call__(self, func: Any, *tensors: int) -> int:
        plan, _, _ = self._propagator.plan(func, tuple(self.metas[tensor] for tensor in tensors))
        return self._issue(plan, tensors)

    def gather(self, tensor: int) -> int:
        """The full tensor on each rank, by a collective."""
        plan = self._propagator.redistributions((self.metas[tensor],), ((Replicate(),),))
        return self._issue(plan, (tensor,))

    def _issue(self, plan: Any, tensors: tuple[int, ...]) -> int:
        results = tuple(range(len(self.metas) + 1, len(self.metas) + 1 + len(plan.made)))
        self.metas.update(zip(results, plan.made, strict=True))
        action = Define(plan.number, plan.operation, plan.program, 0, plan.made, plan.writes)
        self.issued.append(Issued(action, tensors, (), results))
        return results[0] if results else 0

    def lines(self, inputs: tuple[int, ...], results: tuple[int, ...], written: tuple[int, ...] = ()) -> list[str]:
        """The action of each line, with the index of its operation."""
        source = source_of(renamed(self.issued, inputs, results, self.metas, written)[0])
        constants = [source.constants[re.search(r"\bk\d+", line)[0]] for line in source.lines]  # type: ignore[index]
        names = [item.value.split(".")[1] if item.kind == "operation" else item.kind for item in constants]
        return [f"{name} {operation}" for name, operation in zip(names, source.operations, strict=True)]


def test_a_sum_over_ranks_is_waited_for_where_it_is_needed() -> None:
    step = ShardedStep()
    x, y = step.define(4, 4), step.define(4)
    first = step.gather(step(aten.sum.default, x))
    second = step.gather(step(aten.sum.default, y))
    total = step(aten.add.Tensor, first, second)
    lines = step.lines((x, y), (total,), written=(x, y))
    assert lines == ["sum 0", "exchange 1", "sum 2", "exchange 3", "finish 1", "finish 3", "add 4"]


def test_a_sum_of_inputs_that_do_not_change_is_begun_first() -> None:
    step = ShardedStep()
    x, labels = step.define(4, 4), step.define(4, dtype=torch.int64)
    loss = step(aten.sum.default, step(aten.exp.default, x))
    count = step.gather(step(aten.sum.default, labels))
    mean = step(aten.div.Tensor, step.gather(loss), count)
    lines = step.lines((x, labels), (mean,), written=(x,))
    assert lines == [
        "sum 2", "exchange 3", "exp 0", "sum 1", "exchange 4", "finish 3", "finish 4", "div 5",
    ]  # fmt: skip


def test_a_sum_of_what_the_step_changes_stays_where_it_is() -> None:
    step = ShardedStep()
    x = step.define(4)
    copy = step(aten.clone.default, x)
    step(aten.neg_.default, copy)
    total = step.gather(step(aten.sum.default, copy))
    assert step.lines((x,), (total,)) == ["clone 0", "neg_ 1", "sum 2", "exchange 3", "finish 3"]


def test_a_number_that_needs_a_sum_is_computed_when_used() -> None:
    step = ShardedStep()
    x, y = step.define(4, 4), step.define(4, 4)
    loss = step(aten.neg.default, step.gather(step(aten.sum.default, x)))
    power = step(aten.exp.default, y)
    lines = step.lines((x, y), (loss, power), written=(x, y))
    assert lines == ["sum 0", "exchange 1", "exp 3", "finish 1", "neg 2"]


def test_small_tensors_are_gathered_together_unless_they_change_in_between() -> None:
    step = ShardedStep()
    x, y, z = step.define(8, 8), step.define(8, 8), step.define(8, 8)
    first = step(aten.exp.default, step.gather(x))
    step(aten.neg_.default, z)
    second, third = step(aten.exp.default, step.gather(y)), step(aten.exp.default, step.gather(z))
    lines = step.lines((x, y, z), (first, second, third), written=(x, y, z))
    assert lines == [
        "exchange 0", "finish 0", "exp 1", "neg_ 2", "finish 0", "exp 4", "exchange 5", "finish 5", "exp 6",
    ]  # fmt: skip


def test_what_a_collective_reads_changes_only_after_it() -> None:
    step = ShardedStep()
    x = step.define(8, 8)
    whole = step.gather(x)
    step(aten.neg_.default, x)
    result = step(aten.exp.default, whole)
    assert step.lines((x,), (result,), written=(x,)) == ["exchange 0", "finish 0", "neg_ 1", "exp 2"]


def test_the_first_gradient_waits_for_no_loss() -> None:
    step = ShardedStep()
    x = step.define(4, 4)
    loss = step.gather(step(aten.sum.default, x))
    gradient = step(aten.ones_like.default, loss)
    lines = step.lines((x,), (loss, gradient), written=(x,))
    assert lines == ["sum 0", "exchange 1", "ones 2", "finish 1"]


def test_random_operations_follow_from_the_seed_and_their_place() -> None:
    step = Step(10)
    x = step.define(1, 1000)
    first = step(aten.bernoulli.p, x, 0.5, drawn=1)
    second = step(aten.bernoulli.p, x, 0.5, drawn=2)
    run = runnable(step.program((x,), (first, second))[0])
    first_draw, second_draw = run([torch.ones(1000)], seed_number(3, 10))
    again = run([torch.ones(1000)], seed_number(3, 11))[0]
    assert not torch.equal(first_draw, second_draw)
    assert torch.equal(second_draw, again)  # the second draws what the first of a step that begins one later draws


def test_outside_tensors_that_a_step_reads_are_watched_by_name() -> None:
    factor, layer = 2.0, torch.nn.Dropout(0.5)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        return layer(x) * factor, optimizer

    watched = Watched(step, ())
    assert watched.changed() == ""
    layer.eval()
    assert watched.changed() == "layer.training changed from True to False"
    layer.train()
    optimizer.param_groups[0]["lr"] = 0.2
    assert watched.changed() == "optimizer.param_groups[0]['lr'] changed from 0.1 to 0.2"
    optimizer.param_groups[0]["lr"] = 0.1
    factor = 3.0
    assert watched.changed() == "factor changed from 2.0 to 3.0"


def test_a_method_watches_its_object_and_a_module_its_parameters() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.scale = 1.0
            self.model = torch.nn.Linear(2, 2)

        def step(self) -> torch.Tensor:
            return self.model.weight * self.scale

    trainer = Trainer()
    watched = Watched(trainer.step, ())
    trainer.scale = 2.0
    assert watched.changed() == "self.scale changed from 1.0 to 2.0"
    trainer.scale = 1.0
    trainer.model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert watched.changed() == "self.model.weight is another object"
