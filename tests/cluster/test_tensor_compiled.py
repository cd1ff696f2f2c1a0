"""Compiled steps on two real processes: equal values from one message, and notices of steps that stay uncompiled."""

import copy
import gc
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import monarch_nb
from monarch_nb.distributed import CompileError, CompileWarning, Mesh, MeshTensor, TensorError
from tests.cluster.actor_tools import spawned

pytestmark = pytest.mark.timeout(120)
Step = Callable[..., Any]
Maker = Callable[[], torch.Tensor]
Compiler = Callable[[Step], Step]
Views = Callable[[Maker, Compiler], Iterator[Any]]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    for procs in spawned(2, "compiled"):
        yield Mesh.of(procs, ("data",))


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompileWarning)
        yield


NET = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 4))


def training(mesh: Mesh, *, zero_first: bool = True, **options: Any) -> tuple[nn.Module, Step, tuple[MeshTensor, ...]]:
    """A model, its step, and a batch cut over the mesh."""
    torch.manual_seed(1)
    model = copy.deepcopy(NET).to(mesh.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **(options or {"fused": True}))
    x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if zero_first:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss.detach()

    batch = monarch_nb.distribute(x, mesh, ["data", None]), monarch_nb.distribute(y, mesh, ["data"])
    return model, step, batch


@pytest.mark.parametrize("zero_first", [True, False])
def test_a_compiled_step_gives_exactly_what_the_step_gives(mesh: Mesh, zero_first: bool) -> None:
    losses, models = [], []
    for compiled in (False, True):
        model, step, batch = training(mesh, zero_first=zero_first)
        run = monarch_nb.compile(step) if compiled else step
        losses.append([run(*batch).item() for _ in range(7)])
        models.append(model)
    assert losses[1] == losses[0]  # dropout, too
    assert (run.programs, run.calls) == (1, 4)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first.full_tensor(), second.full_tensor())
        assert (first.grad is None) == (second.grad is None) == (not zero_first)
        if zero_first:
            assert torch.equal(first.grad.full_tensor(), second.grad.full_tensor())


@pytest.mark.slow
def test_a_graph_of_a_step_gives_exactly_what_the_step_gives(mesh: Mesh) -> None:
    _, step, batch = training(mesh)
    eager = [step(*batch).item() for _ in range(6)]
    _, step, batch = training(mesh)
    run = monarch_nb.compile(step, backend="fx")
    assert [run(*batch).item() for _ in range(6)] == eager  # dropout, too
    assert run.calls == 3


def test_a_graph_that_fails_says_so_and_the_mesh_goes_on(mesh: Mesh) -> None:
    table = nn.Embedding(4, 2).to(mesh.device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return table(tokens).detach() * 2

    run = monarch_nb.compile(step, backend="fx")
    good = monarch_nb.distribute(torch.tensor([0, 3]), mesh)
    run(good)
    run(good)
    broken = run(monarch_nb.distribute(torch.tensor([0, 99]), mesh))
    with pytest.raises(TensorError, match=r"a compiled step \(fx\) failed.*IndexError"):
        broken.full_tensor()
    assert run(good).shape == (2, 2)
    mesh.synchronise()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, and there is none here")
def test_inductor_gives_the_same_result_as_the_plain_step(mesh: Mesh) -> None:
    def losses(run: Step, batch: tuple[MeshTensor, ...]) -> list[float]:
        return [run(*batch).item() for _ in range(5)]

    model, step, batch = training(mesh)
    model.eval()
    eager = losses(step, batch)
    model, step, batch = training(mesh)
    with pytest.raises(CompileError, match=r"draws random numbers.*backend=\"fx\""):
        losses(monarch_nb.compile(step, backend="inductor"), batch)
    model, step, batch = training(mesh)
    model.eval()
    assert losses(monarch_nb.compile(step, backend="inductor"), batch) == pytest.approx(eager, abs=1e-4)


def test_a_gradient_that_somebody_keeps_stays_what_it_was(mesh: Mesh) -> None:
    model, step, batch = training(mesh)
    run = monarch_nb.compile(step)
    for _ in range(4):
        run(*batch)
    gradient = model[0].bias.grad
    before = gradient.full_tensor()
    run(*batch)
    assert torch.equal(gradient.full_tensor(), before)
    assert not torch.equal(model[0].bias.grad.full_tensor(), before)
    for parameter in model.parameters():
        parameter.grad = None
    run(*batch)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert run.calls == 3


def test_a_kept_gradient_counts_as_written_by_its_last_step(mesh: Mesh) -> None:
    model, step, batch = training(mesh)
    run, stream = monarch_nb.compile(step), mesh.stream
    for _ in range(5):
        start = stream.sent()
        run(*batch)
    gradient = model[0].bias.grad
    assert gradient.reference.number in stream.held.written_from(start)
    end = stream.sent()
    run(*batch)  # makes another gradient
    assert model[0].bias.grad is not gradient
    assert gradient.reference.number in stream.held.written_from(start)
    assert gradient.reference.number not in stream.held.written_from(end)


@pytest.mark.slow
def test_other_shapes_and_eval_mode_are_captured_anew(mesh: Mesh) -> None:
    model, step, (x, y) = training(mesh)
    run = monarch_nb.compile(step)
    for _ in range(3):
        run(x, y)
    short = x[:, :].clone()[:4].redistribute(["data", None]), y.clone()[:4].redistribute(["data"])
    for _ in range(3):
        run(*short)
    assert run.programs == 2
    model.eval()
    for _ in range(3):
        run(x, y)
    assert run.programs == 3
    model.train()
    calls = run.calls
    run(x, y)
    run(*short)
    assert (run.programs, run.calls) == (3, calls + 2)


def test_numbers_that_change_are_refused_with_their_line(mesh: Mesh) -> None:
    _, step, batch = training(mesh, fused=False, foreach=False)
    with pytest.raises(CompileError, match=r"AdamW counts its steps in Python.*AdamW\(\.\.\., fused=True\)"):
        monarch_nb.compile(step)(*batch)
    number = [0.0]

    def growing(x: torch.Tensor) -> torch.Tensor:
        number[0] += 1.0
        return x * number[0]

    run = monarch_nb.compile(growing)
    run(batch[0])
    with pytest.raises(CompileError, match=r"takes the number 1.0 before and 2.0 now[\s\S]*return x \* number\[0\]"):
        run(batch[0])


@pytest.mark.slow
def test_a_learning_rate_that_is_a_tensor_may_change(mesh: Mesh) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(NET).to(mesh.device)
        rate = torch.tensor(1e-2, device=mesh.device)
        optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        x = mesh.ones(4, 8, sharding_spec=["data", None])

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = monarch_nb.compile(step) if compiled else step
        series = []
        for _ in range(6):
            series.append(run(x).item())
            scheduler.step()
        losses.append(series)
    assert losses[1] == losses[0]
    assert run.calls == 3


def test_steps_that_wait_for_a_value_run_uncompiled_with_one_notice(mesh: Mesh) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    run = monarch_nb.compile(step)
    x = mesh.ones(4, sharding_spec=["data"])
    run(x)
    with pytest.warns(CompileWarning, match=r"waits for a value[\s\S]*if x.sum\(\) > 0:[\s\S]*torch.where"):
        run(x)
    assert run(x).tolist() == [2.0] * 4
    assert run(-x).tolist() == [-2.0] * 4


def test_an_error_in_a_compiled_step_names_the_issuing_line(mesh: Mesh) -> None:
    table = nn.Embedding(4, 2).to(mesh.device)

    def step(tokens: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            looked_up = table(tokens)
            return looked_up * 2, values + 1

    run = monarch_nb.compile(step)
    good = monarch_nb.distribute(torch.tensor([0, 3]), mesh)
    ones = mesh.ones(2)
    for _ in range(3):
        run(good, ones)
    broken, fine = run(monarch_nb.distribute(torch.tensor([0, 99]), mesh), ones)
    assert run.calls == 2
    with pytest.raises(TensorError) as caught:
        broken.full_tensor()
    assert caught.value.origin is not None
    assert caught.value.origin.source == "looked_up = table(tokens)"
    assert "embedding" in caught.value.operation
    assert fine.tolist() == [2.0, 2.0]  # results that do not depend on it are computed
    assert run(good, ones)[1].tolist() == [2.0, 2.0]


def test_the_check_finds_a_step_that_no_longer_does_the_same(mesh: Mesh) -> None:
    hidden = [["+"]]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1.0 if hidden[0][0] == "+" else x * 3.0

    run = monarch_nb.compile(step, check_every=3)
    x = mesh.ones(2)
    assert [run(x).tolist() for _ in range(5)] == [[2.0, 2.0]] * 5  # two runs, two calls, and one that is checked
    hidden[0][0] = "*"
    run(x)
    run(x)
    with pytest.raises(CompileError, match=r"aten.add.Tensor before and aten.mul.Tensor now[\s\S]*2 before ran as"):
        run(x)
    assert run(x).tolist() == [3.0, 3.0]


def test_collectives_of_a_compiled_step_are_accounted_like_the_plain_ones(mesh: Mesh) -> None:
    table = mesh.stream.table

    def step(x: torch.Tensor) -> Any:
        return x.sum().redistribute([torch.distributed.tensor.Replicate()])  # type: ignore[attr-defined]

    x = mesh.ones(4, sharding_spec=["data"])
    table.clear()
    step(x)
    [once] = [movement for movement in table.movements() if movement.operation == "redistribute"]
    run = monarch_nb.compile(step)
    table.clear()
    for _ in range(5):
        run(x)
    [moved] = [movement for movement in table.movements() if movement.operation == "redistribute"]
    assert run.calls == 3
    assert (moved.count, moved.nbytes, moved.origin) == (5 * once.count, 5 * once.nbytes, once.origin)


@pytest.mark.slow
def test_nothing_of_a_compiled_step_stays_behind(mesh: Mesh) -> None:
    _, step, batch = training(mesh)
    run = monarch_nb.compile(step)
    for _ in range(4):
        run(*batch)
    mesh.synchronise()
    before = len(mesh.stream.table.live())
    for _ in range(50):
        run(*batch)
    mesh.synchronise()
    assert len(mesh.stream.table.live()) == before


def test_results_with_a_consumed_or_a_live_graph_are_explained(mesh: Mesh) -> None:
    weight = mesh.ones(4).requires_grad_()

    def used(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = (x * weight).square().sum()
        loss.backward()
        return loss

    def open_graph(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).square().sum()

    x = mesh.ones(4)
    run = monarch_nb.compile(used)
    run(x)
    run(x)
    loss = run(x)
    assert (run.calls, loss.item(), weight.grad.tolist()) == (1, 4.0, [2.0] * 4)
    with pytest.raises(CompileError, match="inside of the step only"):
        loss.backward()
    run = monarch_nb.compile(open_graph)
    run(x)
    with pytest.warns(CompileWarning, match="returns a tensor with its graph"):
        loss = run(x)
    loss.backward()
    assert weight.grad.tolist() == [4.0] * 4


def test_a_step_must_return_the_tensors_it_keeps(mesh: Mesh) -> None:
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> None:
        kept.append(x + 1)

    run = monarch_nb.compile(step)
    x = mesh.ones(2)
    run(x)
    with pytest.warns(CompileWarning, match=r"keeps what aten.add.Tensor has made[\s\S]*kept.append\(x \+ 1\)"):
        run(x)


def returned_views(make: Maker, compiled: Compiler) -> Iterator[torch.Tensor]:
    """Views of an argument and of another result, all written to afterwards."""

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled = x * 2
        return x[1:4], x.view(2, 4), doubled, doubled[2:7]

    step = compiled(views)
    for _ in range(5):
        x = make()
        part, square, doubled, middle = step(x)
        x.add_(1)
        part.mul_(3)
        square[1].sub_(1)
        middle.add_(5)
        yield from (x, part, square, doubled, middle)


def views_of_what_the_step_writes_to(make: Maker, compiled: Compiler) -> Iterator[torch.Tensor]:
    """A step reads a view before and after it writes to the base, and a view that it does not see changes, too."""
    base = make()
    part, overlap = base[1:4], base[3:6]

    def around(x: torch.Tensor) -> torch.Tensor:
        before = part.sum()
        base.view(4, 2)[1:3].add_(1)
        x[:5].mul_(2)
        return before + part.sum()

    step = compiled(around)
    for _ in range(5):
        x = make()
        tail = x[4:7]
        yield from (step(x), overlap, tail, part)


def arguments_that_share_memory(make: Maker, compiled: Compiler) -> Iterator[torch.Tensor]:
    """Arguments that were apart when the step was captured are views of each other in some later calls."""

    def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y + 1

    step = compiled(adds)
    for shares in (False, False, False, True, False, True, True, True):
        x = make()
        yield from (step(x, x[1:4] if shares else make()[1:4]), x)


@pytest.mark.parametrize(
    "program",
    [returned_views, views_of_what_the_step_writes_to, arguments_that_share_memory],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("backend", ["python", "fx"])
@pytest.mark.filterwarnings("ignore::monarch_nb.distributed.GatherWarning")
def test_views_in_a_compiled_step_show_what_views_show(mesh: Mesh, program: Views, backend: str) -> None:
    steps = []

    def compiled(step: Step) -> Step:
        steps.append(monarch_nb.compile(step, backend=backend, check_every=0))
        return steps[-1]

    expected = [value.tolist() for value in program(lambda: torch.arange(8.0), lambda step: step)]
    results = program(lambda: monarch_nb.distribute(torch.arange(8.0), mesh, ["data"]), compiled)
    assert [value.full_tensor().tolist() for value in results] == expected
    assert steps[0].calls >= 2


def test_a_step_that_returns_a_view_alone_says_why(mesh: Mesh) -> None:
    x = monarch_nb.distribute(torch.arange(8.0), mesh, ["data"])
    step = monarch_nb.compile(lambda x: (x * 2)[1:4])
    with pytest.warns(CompileWarning, match=r"a view of what aten.mul.Tensor has made(.|\n)*view.clone()"):
        assert [step(x).full_tensor().tolist() for _ in range(3)] == [[2.0, 4.0, 6.0]] * 3


def test_a_step_can_return_what_it_updates(mesh: Mesh) -> None:
    average = monarch_nb.distribute(torch.zeros(4), mesh, ["data"])

    @monarch_nb.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        average.mul_(0.5).add_(x)
        return average.detach()

    x = monarch_nb.distribute(torch.ones(4), mesh, ["data"])
    results = [step(x).full_tensor()[0].item() for _ in range(5)]  # type: ignore[attr-defined]
    assert results == [1.0, 1.5, 1.75, 1.875, 1.9375]
    assert step.calls == 3
    step(x).zero_()
    assert average.full_tensor().tolist() == [0.0] * 4


def test_a_gradient_that_was_there_before_is_not_missed(mesh: Mesh) -> None:
    weight = monarch_nb.distribute(torch.ones(4), mesh, ["data"]).requires_grad_()
    gradient = monarch_nb.distribute(torch.arange(4.0), mesh, ["data"])

    def step() -> torch.Tensor:
        weight.grad = gradient
        return weight.detach() * 2

    def gradients(run: Step) -> list[list[float]]:
        values = []
        for _ in range(5):
            weight.grad = None
            run()
            values.append(weight.grad.full_tensor().tolist())  # type: ignore[attr-defined]
        return values

    with pytest.warns(CompileWarning, match=r"a tensor that was there before.*gradient.clone\(\)"):
        results = gradients(monarch_nb.compile(step))
    assert results == [[0.0, 1.0, 2.0, 3.0]] * 5


def test_deeply_nested_leaves_are_recognised_and_released_with_their_tensor(mesh: Mesh) -> None:
    hidden = [[[[[{"weight": mesh.ones(4).requires_grad_()}]]]]]  # deeper than a step is looked into
    number = hidden[0][0][0][0][0]["weight"].reference.number

    def step(x: torch.Tensor) -> torch.Tensor:
        weight = hidden[0][0][0][0][0]["weight"]
        weight.grad = None
        loss = (x * weight).sum()
        loss.backward()
        return loss.detach()

    run = monarch_nb.compile(step)
    x = mesh.full((4,), 3.0)
    assert number not in mesh.stream.held.leaves
    for _ in range(4):
        run(x)
    assert (run.programs, run.calls) == (1, 2)
    assert hidden[0][0][0][0][0]["weight"].grad.tolist() == [3.0] * 4
    assert number in mesh.stream.held.leaves
    del run, step
    hidden.clear()
    gc.collect()
    mesh.synchronise()
    assert number not in mesh.stream.held.leaves


def test_torch_compile_leaves_the_code_of_operations_alone(mesh: Mesh) -> None:
    x = monarch_nb.distribute(torch.ones(4, 4), mesh, ["data", None])
    compiled = torch.compile(lambda x: (torch.relu(x) + 1).sum(), backend="eager")
    frames = torch._dynamo.utils.counters["frames"]  # type: ignore[attr-defined, no-untyped-call]
    frames.clear()
    assert compiled(x).item() == 32
    with mesh.activate():
        assert monarch_nb.inspect(compiled(torch.ones(4))).item() == 8
    assert frames["total"] <= 4  # those of the function, not of what it calls


def test_torch_compile_runs_operators_of_the_ranks_own_values(mesh: Mesh) -> None:
    def function(x: Any) -> Any:
        y = (2 * x + 1) @ x
        x -= 1
        return y if len(x) > 1 else -y

    with mesh.activate():
        x, expected = torch.arange(3.0), torch.tensor([13.0, -1.0, 0.0, 1.0])
    compiled = torch.compile(function, backend="eager")
    assert torch.cat([compiled(x).reshape(1), x]).tolist() == expected.tolist()
