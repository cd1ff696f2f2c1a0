"""The holders of the memory of tensors, by name: now, and at a peak."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from monarch_nb.diagnosis.tensor_allocations import ACTIVATIONS, BACKWARD, TensorAllocations
from monarch_nb.runtime.tensor_memory import (
    BUFFERS,
    GRADIENTS,
    MOST,
    OTHER,
    PARAMETERS,
    STATES,
    HeldMemory,
    LivingTensors,
    PeakMemory,
    held_memory,
    is_out_of_memory,
    lines_of,
    summed,
)

pytestmark = pytest.mark.timeout(60)
KB = 1 << 10
WEIGHT = 64 * 512 * 4  # bytes


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
        self.register_buffer("scale", torch.ones(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _sizes(parts: tuple[HeldMemory, ...]) -> dict[tuple[str, str], int]:
    return {(part.kind, part.name): part.size for part in parts}


def _at_peak(peaks: tuple[PeakMemory, ...]) -> dict[tuple[str, str], int]:
    (peak,) = (peak for peak in peaks if peak.device == "cpu")
    assert sum(part.held.size for part in peak.parts) == peak.size
    return _sizes(tuple(part.held for part in peak.parts))


def test_parameters_gradients_states_and_buffers_have_the_names_of_the_program() -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    named = {(entry.kind, entry.name) for entry in LivingTensors().named}
    assert {
        (PARAMETERS, "Wide.up.weight"),
        (GRADIENTS, "Wide.up.weight"),
        (STATES, "AdamW exp_avg of Wide.up.weight"),
        (BUFFERS, "Wide.scale"),
    } <= named
    sizes = _sizes(held_memory())
    assert sizes[PARAMETERS, "Wide.up.weight"] == sizes[GRADIENTS, "Wide.up.weight"] == WEIGHT


def test_a_view_and_its_base_count_once_and_by_name() -> None:
    model = Wide()
    rows = [model.up.weight[row] for row in range(8)]
    largest = torch.ones(1 << 22)
    living = LivingTensors()
    living.named = [entry for entry in living.named if entry.tensor is model.up.weight]
    living.all = [*rows, model.up.weight, largest, largest.view(2, -1)]
    assert held_memory(living) == (
        HeldMemory(OTHER, f"float32 [{1 << 22}]", "cpu", 4 << 22),
        HeldMemory(PARAMETERS, "Wide.up.weight", "cpu", WEIGHT),
    )


def test_lines_have_the_largest_first_and_count_the_rest() -> None:
    parts = [HeldMemory(PARAMETERS, f"Net.{number}", "cpu", number * KB) for number in range(1, MOST + 3)]
    parts += [HeldMemory(STATES, "AdamW step of Net.1", "cuda:0", 400 * KB), HeldMemory(OTHER, "int8 [1]", "cpu", 1, 9)]
    assert lines_of(summed(parts)) == [
        "optimizer states on cuda:0 400 kB: AdamW step of Net.1 400 kB",
        "parameters 55.0 kB: Net.10 10.0 kB, Net.9 9.00 kB, Net.8 8.00 kB, 7 more",
        "other tensors 1 B: 9 × int8 [1] 1 B",
    ]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("MemoryError", "", True),
        ("RuntimeError", "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("AcceleratorError", "CUDA error: out of memory", True),
        ("GpuMemoryError", "pretence: device 0 has no room for 3 bytes", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", False),
        ("ValueError", "out of memory", False),
    ],
)
def test_errors_of_memory_that_ran_out_are_known(kind: str, text: str, expected: bool) -> None:
    assert is_out_of_memory(kind, text) is expected


def test_a_peak_has_what_lived_then_and_nothing_else() -> None:
    recording = TensorAllocations()
    first = torch.empty(1000, dtype=torch.uint8)
    torch.empty(2000, dtype=torch.uint8)
    second = torch.empty(3000, dtype=torch.uint8)
    view = second[10:]
    del second
    torch.empty(100, dtype=torch.uint8)  # after the peak
    del view
    third = torch.empty(500, dtype=torch.uint8)
    peaks = recording.end()
    sizes = [size for (_, name), size in _at_peak(peaks).items() if name.startswith("uint8")]
    assert {1000, 3000, 100} <= set(sizes)
    assert not {2000, 500} & set(sizes)
    assert {part.source.rpartition("/")[2].partition(":")[0] for part in peaks[0].parts if part.source} == {
        "test_tensor_memory.py"
    }
    del first, third


def test_a_peak_of_training_is_named_by_parameter_and_module() -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    recording = TensorAllocations()
    for _ in range(2):
        model(torch.ones(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes = _at_peak(recording.end())
    assert sizes[PARAMETERS, "Wide.up.weight"] == sizes[STATES, "AdamW exp_avg of Wide.up.weight"] == WEIGHT
    assert sizes[GRADIENTS, "Wide.down.weight"] == WEIGHT
    assert sizes[ACTIVATIONS, "Wide"] == 256 * 512 * 4
    assert any(kind == BACKWARD and name == "Wide" for kind, name in sizes)


def test_a_model_that_is_made_while_it_is_watched_has_names() -> None:
    recording = TensorAllocations()
    model = Wide()
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sizes = _at_peak(recording.end())
    assert sizes[PARAMETERS, "Wide.up.weight"] == WEIGHT
    assert sizes[BUFFERS, "Wide.scale"] == 4000


def test_what_only_a_graph_of_a_backward_pass_holds_still_lives() -> None:
    x = torch.ones(1000, requires_grad=True)
    recording = TensorAllocations()
    loss = (x * 2).exp().sum()  # exp keeps its result
    (kind,) = [kind for kind in recording.alive() if kind.what == "float32 [1000]"]
    assert recording.alive()[kind] == (4000, 1)
    loss.backward()
    assert kind not in recording.alive() or recording.alive()[kind][1] == 1, "that of the gradient"
    recording.end()
