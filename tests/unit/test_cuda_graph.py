"""Steps that are replayed as a CUDA graph, with a graph that runs the function again in place of a device's."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from monarch_nb.tensor.compiled import replay
from monarch_nb.tensor.compiled.replay import CudaGraph
from monarch_nb.tensor.errors import CompileWarning

pytestmark = pytest.mark.timeout(60)

Tensors = list[torch.Tensor]


def fake_capture(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """Stands in for `captured`: a replay reads inputs and writes results in place, and nothing runs now."""
    results = [tensor.clone().fill_(-1) for tensor in run_without_effect(run)]

    def replay() -> None:
        for buffer, value in zip(results, run(), strict=True):
            buffer.copy_(value)

    return replay, results


def run_without_effect(run: Callable[[], Tensors]) -> Tensors:
    before = [tensor.clone() for tensor in STATE]
    results = run()
    for tensor, value in zip(STATE, before, strict=True):
        tensor.copy_(value)
    return results


STATE: Tensors = []


def step(inputs: Tensors, seed: int) -> Tensors:
    """Adds a batch to a state; gives the sum and the batch's double."""
    batch, state = inputs
    state.add_(batch)
    return [state.sum(), batch * 2]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    tensor = torch.zeros(2)
    STATE[:] = [tensor]
    monkeypatch.setattr(replay, "captured", fake_capture)
    return tensor


def test_calls_see_their_own_arguments_and_the_state_of_the_last(state: torch.Tensor) -> None:
    run = CudaGraph(step, 1, (), "step")
    results = [run([torch.full((2,), float(number)), state], 0) for number in (1, 2, 3, 4)]
    assert [float(total) for total, _ in results] == [2.0, 6.0, 12.0, 20.0]
    assert [double.tolist() for _, double in results] == [[2.0] * 2, [4.0] * 2, [6.0] * 2, [8.0] * 2]


def test_a_state_that_lies_elsewhere_now_is_captured_anew(state: torch.Tensor) -> None:
    run = CudaGraph(step, 1, (), "step")
    batch = torch.ones(2)
    for _ in range(3):
        run([batch, state], 0)
    new_state = torch.full((2,), 10.0)
    STATE[:] = [new_state]
    assert float(run([batch, new_state], 0)[0]) == 22.0
    assert state.tolist() == [3.0, 3.0]


def test_an_argument_that_the_step_writes_to_is_written(state: torch.Tensor) -> None:
    def writes(inputs: Tensors, seed: int) -> Tensors:
        inputs[0].mul_(2)
        return []

    run = CudaGraph(writes, 1, (0,), "step")
    for _ in range(3):
        batch = torch.ones(2)
        run([batch], 0)
        assert batch.tolist() == [2.0, 2.0]


def test_a_result_that_is_a_view_of_the_state_stays_one(state: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "captured", lambda run: (lambda: None, run()))
    run = CudaGraph(lambda inputs, seed: [inputs[0][:1]], 0, (), "step")
    for _ in range(3):
        (view,) = run([state], 0)
    state.fill_(7)
    assert view.tolist() == [7.0]


def test_a_step_that_cannot_be_captured_runs_and_warns_once(
    state: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(replay, "captured", refuse)
    run = CudaGraph(step, 1, (), "the step")
    with pytest.warns(CompileWarning, match=r"the step runs without a CUDA graph.*capturing$") as warnings:
        totals = [float(run([torch.ones(2), state], 0)[0]) for _ in range(4)]
    assert totals == [2.0, 4.0, 6.0, 8.0]
    assert len(warnings) == 1


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    captures = [0]

    def count(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        captures[0] += 1
        return fake_capture(run)

    monkeypatch.setattr(replay, "captured", count)
    return captures


def test_a_tensor_that_moves_each_time_is_copied(state: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = count_captures(monkeypatch)
    run = CudaGraph(lambda inputs, seed: [inputs[0] + inputs[1], inputs[1].mul_(2)[:0].sum()], 0, (1,), "step")
    buffers = [torch.ones(2) for _ in range(8)]
    for number, buffer in enumerate(buffers, 1):
        buffer.fill_(number)
        STATE[:] = [state, buffer]
        assert run([state, buffer], 0)[0].tolist() == [number, number]
        assert buffer.tolist() == [2 * number] * 2
    assert captures == [3]


def test_arguments_with_views_are_used_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "captured", lambda run: (lambda: None, run()))
    run = CudaGraph(lambda inputs, seed: [inputs[0][:1], inputs[1] + 1, inputs[2] + 1], 3, (), "step")
    tensor, batch = torch.arange(4.0), torch.ones(2)
    for _ in range(4):
        view, _, _ = run([batch, tensor[:2], tensor[1:]], 0)
        batch.add_(1)
        assert view.tolist() == batch[:1].tolist()


def test_a_step_whose_views_move_each_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "captured", lambda run: (lambda: None, run()))
    run = CudaGraph(lambda inputs, seed: [inputs[0][:1]], 1, (), "step")
    buffers = [torch.full((2,), float(number)) for number in range(12)]
    with pytest.warns(CompileWarning, match="lie elsewhere in each call"):
        values = [float(run([buffer], 0)[0]) for buffer in buffers]
    assert values == [float(number) for number in range(12)]
