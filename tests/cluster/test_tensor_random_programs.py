"""Random programs of sharded tensors give the results of local torch: values, gradients, errors."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.effort import daily, tries
from tests.random_programs.fleet import Fleet
from tests.random_programs.generator import generate
from tests.random_programs.judge import EQUAL, REFUSED, UNJUDGED, WRONG, judge_program
from tests.random_programs.local import (
    Expected,
    Local,
    Target,
    Unjudged,
    expect,
    explained_by_rounding,
    rounding_variants,
)
from tests.random_programs.program import Head, Input, Line, Program, paste_text
from tests.random_programs.results import Results
from tests.random_programs.runner import MESHES, Report, Tally, run
from tests.random_programs.shrink import shrink_program
from tests.random_programs.worker import reports

DAILY_MESHES = ((2,), (2, 2), (2,), (2,), (2, 2), (2,), (2, 1, 2), (2,))
SEED = 2026
R = Replicate()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    meshes = Fleet([*DAILY_MESHES, (2, 2)])
    yield meshes
    meshes.stop()
    torch.set_num_threads(threads)


def verdict(tally: Tally) -> str:
    """Why the run has failed; "" where all programs are right, but for a few that are refused or cannot be judged."""
    if tally.failures:
        return "\n\n".join([tally.line(), *map(str, tally.failures[:5])])
    if tally.too_many_refused or tally.too_many_unjudged:
        return f"too many are refused or cannot be judged\n{tally}"
    return ""


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of local tensors: PyTorch warns of some of what programs do
@pytest.mark.parametrize("count", daily([16, 150], 1))
def test_random_programs_come_to_what_local_torch_makes_of_them(fleet: Fleet, count: int) -> None:
    print(f"{tries(count)} programs from seed {SEED}")
    tally = Tally()
    for report in reports(range(SEED, SEED + tries(count)), fleet, DAILY_MESHES):
        tally.add(report)
    print(tally)
    assert not (text := verdict(tally)), text


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", daily([4, 16], 1))
def test_random_programs_compiled_come_to_the_same(fleet: Fleet, count: int) -> None:
    print(f"{tries(count)} programs from seed {SEED}")
    tally = Tally()
    for report in reports(range(SEED, SEED + tries(count)), fleet, DAILY_MESHES, compiled="python"):
        tally.add(report)
    print(tally)
    assert not tally.failures, verdict(tally)
    assert tally.kinds["equal"] > count / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["python", "fx"])
def test_a_thousand_random_programs_compiled_come_to_the_same(backend: str) -> None:
    seed = int(time.time()) * 10_000
    print(f"1000 programs from seed {seed}")
    tally = run(range(seed, seed + 1000), MESHES, compiled=backend)
    print(tally)
    assert not tally.failures, verdict(tally)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_random_programs_give_the_results_of_local_torch() -> None:
    seed = int(time.time()) * 10_000
    print(f"10000 programs from seed {seed}")
    tally = run(range(seed, seed + 10_000), MESHES)
    print(tally)
    assert not (text := verdict(tally)), text


# -- the judge -------------------------------------------------------------------------------------------------------


def program(*lines: tuple[str, tuple[str, ...], tuple[str, ...]], heads: tuple[Head, ...] = ()) -> Program:
    """Lines on `v0` of (5, 3), cut by rows, and `v1` of 3, of which ranks have parts."""
    inputs = (
        Input("v0", (5, 3), torch.float32, 7, (Shard(0),), grad=True),
        Input("v1", (3,), torch.float32, 8, (Partial(),), grad=True),
    )
    return Program(1, (2,), inputs, tuple(Line(text, makes, reads) for text, makes, reads in lines), heads)


TWICE = ("v2 = v0 * v1", ("v2",), ("v0", "v1"))


def test_a_program_is_judged_equal_or_wrong_by_its_values(fleet: Fleet) -> None:
    right = program(TWICE, heads=(Head("v2", (5, 3), torch.float32, 3, (Shard(1),)),))
    expected = expect(right)
    assert judge_program(right, fleet.mesh((2,)), expected).kind == EQUAL
    for name in ("v0", "v2"):
        target = expected.values[name]
        moved = target.value.detach().clone()
        moved[4, 2] += 0.01 * moved.abs().max()
        values = {**expected.values, name: Target(moved.requires_grad_(), target.within)}
        report = judge_program(right, fleet.mesh((2,)), Expected(values, expected.gradients))
        assert (report.kind, name in report.text) == (WRONG, True)
    grad = expected.gradients["v1"]
    assert grad is not None
    rolled = {**expected.gradients, "v1": Target(grad.value.roll(1), grad.within)}
    assert "gradient" in judge_program(right, fleet.mesh((2,)), Expected(expected.values, rolled)).reason


def test_what_is_refused_is_told_from_what_is_wrong(fleet: Fleet) -> None:
    selected = program(("v2 = v0[v0 > 0]", ("v2",), ("v0",)))
    run_locally = expect(program(TWICE))
    report = judge_program(selected, fleet.mesh((2,)), run_locally)
    assert report.kind == REFUSED
    assert "torch.where" in report.text
    missing = Program(1, (2,), selected.inputs, (Line("v0.sum(0)", (), ("v0",), raises=True),))
    assert "local torch raises" in judge_program(missing, fleet.mesh((2,)), run_locally).text


def test_only_an_order_that_depends_on_rounding_is_unjudged(fleet: Fleet) -> None:
    lines = (
        ("v2 = torch.cat([v0[0] / 3, v0[0] * (1 / 3)])", ("v2",), ("v0",)),
        ("v3 = v2.argsort()", ("v3",), ("v2",)),
    )
    ties = program(*lines)
    local = Local(ties)
    for line in ties.lines:
        local.run(line.text)
    values = {name: Target(tensor, 1e-5) for name, tensor in local.tensors.items()}
    order = values["v3"].value
    swapped = order.view(3, 2).flip(1).reshape(-1)
    expected = Expected({**values, "v3": Target(swapped, 0.0)}, {})
    assert judge_program(ties, fleet.mesh((2,)), expected).kind == UNJUDGED
    orders = [run["v3"] for run in rounding_variants(ties)]
    assert explained_by_rounding(swapped, orders, 0.0).all()
    assert not explained_by_rounding(order.roll(2), orders, 0.0).any()
    numbers = [run["v2"] for run in rounding_variants(ties)]
    assert not explained_by_rounding(numbers[0], numbers, 1e-5).any()


def test_a_program_that_nobody_can_judge_is_none() -> None:
    with pytest.raises(Unjudged):
        expect(program(("v2 = (v0 - v0 * (1 + 1e-7)) * 1e7", ("v2",), ("v0",))))
    with pytest.raises(Unjudged):
        expect(program(("v2 = (v0 * 1e7).sin() > 0", ("v2",), ("v0",))))


def test_a_gradient_of_cancelling_terms_may_differ_by_their_rounding() -> None:
    scalar = Input("v0", (), torch.float32, 7, (R,), grad=True)
    lines = (Line("v1 = F.normalize(v0 * 3, dim=0)", ("v1",), ("v0",)),)
    gradient = expect(Program(1, (2,), (scalar,), lines, (Head("v1", (), torch.float32, 3, (R,)),))).gradients["v0"]
    assert gradient is not None
    assert gradient.value.abs() < 1e-6
    assert 1e-8 < gradient.within < 1e-3
    nothing = (Line("v1 = v0 * 0", ("v1",), ("v0",)),)  # of one term, which no order changes
    gradient = expect(Program(1, (2,), (scalar,), nothing, (Head("v1", (), torch.float32, 3, (R,)),))).gradients["v0"]
    assert gradient == Target(gradient.value, 0.0) if gradient is not None else False


def test_a_failing_program_is_reduced_and_printed_for_pasting() -> None:
    lines = [
        ("v2 = v0.cumsum(-1)", ("v2",), ("v0",)),
        ("v3 = v2 + v1", ("v3",), ("v2", "v1")),
        ("v4 = v3.relu()", ("v4",), ("v3",)),
        ("v5 = v4.sort(0).values", ("v5",), ("v4",)),
    ]
    large = program(*lines, heads=(Head("v5", (5, 3), torch.float32, 3, (R,)),))
    smallest = shrink_program(large, lambda candidate, expected: any("relu" in line.text for line in candidate.lines))
    assert [line.text for line in smallest.lines] in (["v4 = v0.relu()"], ["v4 = v1.relu()"])
    assert [source.shape for source in smallest.inputs] in ([(1, 1)], [(1,)])
    text = paste_text(smallest)
    compile(text, "cell", "exec")
    assert "torch.tensor([" in text


def test_an_interrupted_run_continues_with_the_rest_and_the_failures(tmp_path: Path) -> None:
    file = tmp_path / "results" / "of_seeds.jsonl"
    results = Results(file)
    for seed, kind in ((1, "equal"), (2, "wrong"), (3, "hung"), (4, "refused"), (3, "equal")):
        results.add(Report(seed, (2, 2), kind, "reason", "several\nlines"))
    file.write_bytes(file.read_bytes()[:-9])  # in the middle of the last line
    again = Results(file)
    assert [report.seed for report in again.known(range(1, 10))] == [1, 4]
    again.add(Report(3, (2, 2), "equal"))
    assert sorted(report.seed for report in Results(file).known(range(1, 10))) == [1, 3, 4]
    assert [report.mesh for report in again.known(range(1, 2))] == [(2, 2)]


def test_programs_follow_from_their_seeds() -> None:
    texts = [paste_text(generate(seed, (2, 2))) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
