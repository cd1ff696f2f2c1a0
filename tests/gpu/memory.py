"""The memory of a GPU: its owners, its peak, by name, and sharing it by MPS."""

import os
import shutil
import time
from typing import Any

import torch
from torch import nn

import monarch
from monarch.actor import Actor, ActorError, endpoint, this_host
from monarch.distributed import TensorError
from monarch_nb.config import configured
from monarch_nb.diagnosis import MemoryWatch, compare_memory
from monarch_nb.gpu import GpuLoad, load
from monarch_nb.host.gpus import CONTROL
from tests.gpu import DEVICE, NotTried, fact, need_gpu
from tests.gpu.tensors import mesh_of

_ANSWER_S = 60.0
_MB = 1 << 20
_TOO_MUCH = 1 << 42 if DEVICE == "cuda" else 1 << 60


class Wide(nn.Module):
    """Two layers, of 8 MB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Trainer(Actor):
    """A rank that trains on the device."""

    def __init__(self) -> None:
        self.model = Wide().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @endpoint
    def steps(self, count: int) -> int:
        """Steps of training; gives the most bytes that PyTorch's allocator has given."""
        for _ in range(count):
            self.model(torch.ones(2048, 1024, device=DEVICE)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0

    @endpoint
    def too_much(self) -> None:
        """More memory than there is."""
        torch.empty(_TOO_MUCH, device=DEVICE)

    @endpoint
    def load(self, megabytes: int, seconds: float) -> tuple[GpuLoad | None, int]:
        """What the GPU does after some seconds of work beside an allocation, and the bytes of the tensors there."""
        tensor = torch.ones(megabytes * _MB // 4, device=DEVICE)
        x, end = torch.ones(4096, 4096, device=DEVICE), time.monotonic() + seconds
        while time.monotonic() < end:
            x @ x
            torch.cuda.synchronize()
        use = load()
        assert float(tensor[0]) == 1.0
        return use, torch.cuda.memory_allocated()

    @endpoint
    def environment(self) -> tuple[str | None, str | None, int]:
        """Where MPS listens, what part this process may use, and the multiprocessors that it sees."""
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        count = torch.cuda.get_device_properties(0).multi_processor_count
        return os.environ.get(names[0]), os.environ.get(names[1]), count

    @endpoint
    def sleep(self, cycles: int) -> float:
        """Seconds that a kernel of one thread takes."""
        torch.cuda.synchronize()
        began = time.monotonic()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return time.monotonic() - began


def _trainers(count: int, **options: Any) -> tuple[Any, Any]:
    if DEVICE == "cuda":
        need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": count}, **options)
    return procs, procs.spawn("trainers", Trainer)


@fact(limit_s=90, alone=True)
def a_process_has_memory_beside_its_tensors() -> str:
    """NVML says what a process has on the GPU, which is more than its tensors, and how busy the GPU is"""
    need_gpu()
    procs, trainers = _trainers(1)
    use, tensors = trainers.load.call_one(256, 3.0).get(_ANSWER_S)
    procs.stop().get(20)
    assert use is not None, "nothing is known of the GPU"
    assert use.used >= tensors, (use, tensors)
    if use.own < 0:
        raise NotTried(f"NVML does not know the processes of this container; {use}")
    assert tensors <= use.own <= use.used <= use.total, (use, tensors)
    assert use.share > 0.3, use
    return f"{use.own // _MB} MB, {tensors // _MB} MB in tensors, {use.used // _MB} MB by all; {use.share:.0%} busy"


@fact(limit_s=90)
def memory_is_compared() -> str:
    """`compare_memory` says what ranks have on the GPU, and names the largest of their tensors"""
    procs, trainers = _trainers(2)
    trainers.steps.call(2).get(_ANSWER_S)
    text = compare_memory(trainers).inspected
    procs.stop().get(20)
    assert "parameters" in text, text
    assert "Wide.up.weight 8.00 MB" in text, text
    assert DEVICE == "cpu" or "on GPUs " in text, text
    return text


@fact(limit_s=120)
def a_peak_is_named() -> str:
    """The peak of a rank's memory is named by parameter, gradient, state and module"""
    procs, trainers = _trainers(1)
    before = trainers.steps.call_one(0).get(_ANSWER_S)
    with MemoryWatch(trainers) as watch:
        most = trainers.steps.call_one(3).get(_ANSWER_S)
    procs.stop().get(20)
    peak = next(peak for peak in watch.peaks[0] if peak.device.startswith(DEVICE))
    sizes = {(part.held.kind, part.held.name): part.held.size for part in peak.parts}
    for kind, name in (
        ("parameters", "Wide.up.weight"),
        ("gradients", "Wide.down.weight"),
        ("optimizer states", "AdamW exp_avg of Wide.up.weight"),
    ):
        assert sizes.get((kind, name)) == 8 * _MB, f"{kind} {name}: {sizes}"
    assert any(kind == "activations" for kind, _ in sizes), sizes
    assert DEVICE == "cpu" or before >= most or 0.95 * most <= peak.size <= 1.05 * most, (peak.size, most)
    return f"{peak.size // _MB} MB, the allocator's {most // _MB} MB: " + " / ".join(watch.peak_lines)[:300]


@fact(limit_s=120)
def a_peak_of_a_mesh_is_named() -> str:
    """The peak of the ranks of a mesh has the names of the program's parameters and states"""
    with mesh_of(2) as mesh:
        model = monarch.module_to_mesh(Wide(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = monarch.distribute(torch.ones(64, 1024), mesh, ["data", None])
        with MemoryWatch(mesh) as watch:
            for _ in range(2):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            mesh.synchronise()
    peak = next(peak for peak in watch.peaks[0] if peak.device.startswith(DEVICE))
    sizes = {(part.held.kind, part.held.name): part.held.size for part in peak.parts}
    assert sizes["parameters", "Wide.up.weight"] == 8 * _MB, sizes
    assert sizes["optimizer states", "AdamW exp_avg of Wide.up.weight"] == 8 * _MB, sizes
    return " / ".join(watch.peak_lines)[:350]


@fact(limit_s=90)
def out_of_memory_names_what_holds_it() -> str:
    """Out of memory in an endpoint is an error that names what holds the memory, the largest first"""
    procs, trainers = _trainers(1)
    trainers.steps.call(1).get(_ANSWER_S)
    try:
        trainers.too_much.call_one().get(_ANSWER_S)
    except ActorError as error:
        text = str(error)
    else:
        raise AssertionError("there was room")
    procs.stop().get(20)
    report = text[text.index("What holds the memory of this process") :]
    assert "AdamW exp_avg of Wide." in report, report
    assert "parameters" in report, report
    return " / ".join(line.strip() for line in report.splitlines()[:5])


@fact(limit_s=90)
def out_of_memory_on_a_mesh_names_what_holds_it() -> str:
    """Out of memory in an operation on a mesh is an error with the names of the program's parameters"""
    with mesh_of(2) as mesh:
        model = monarch.module_to_mesh(Wide(), mesh)
        try:
            torch.empty(_TOO_MUCH // 4, device=mesh.device).sum().item()
        except TensorError as error:
            text = str(error)
        else:
            raise AssertionError("there was room")
        assert float(model.up.bias.sum()) != 0, "the mesh is not usable"
    assert "Wide.up.weight 8.00 MB" in text, text
    report = text[text.index("What the tensors of") :]
    return " / ".join(line.strip() for line in report.splitlines()[:4])


@fact(limit_s=150, alone=True)
def mps() -> str:
    """Two ranks that share the GPU by MPS run kernels at the same time; its daemon ends with the agent"""
    need_gpu()
    if shutil.which(CONTROL) is None:
        raise NotTried(f"{CONTROL} is not on PATH")
    seconds = {}
    for mode in (True, "mps"):
        with configured(share_gpus=mode):
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            trainers: Any = procs.spawn("trainers", Trainer)
            trainers.sleep.call(1000).get(_ANSWER_S)
            seconds[mode] = max(trainers.sleep.call(int(1.7e9)).get(_ANSWER_S).values())
            pipes = {environment[0] for environment in trainers.environment.call().get(_ANSWER_S).values()}
            assert (None in pipes) is (mode is True), pipes
            procs.stop().get(20)
    assert seconds["mps"] < 0.75 * seconds[True], seconds
    return f"a kernel of a second on each: {seconds[True]:.2f} s in turns, {seconds['mps']:.2f} s by MPS"


@fact(limit_s=150)
def equal_parts_by_mps() -> str:
    """With share_gpus="mps-equal" each of two ranks has half of the multiprocessors, and tensors go between them"""
    need_gpu()
    if shutil.which(CONTROL) is None:
        raise NotTried(f"{CONTROL} is not on PATH")
    total = torch.cuda.get_device_properties(0).multi_processor_count
    with configured(share_gpus="mps-equal"):
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        trainers: Any = procs.spawn("trainers", Trainer)
        environments = list(trainers.environment.call().get(_ANSWER_S).values())
        trainers.steps.call(2).get(_ANSWER_S)
        procs.stop().get(20)
    assert [part for _, part, _ in environments] == ["50", "50"], environments
    assert all(visible < total for _, _, visible in environments), (environments, total)
    return f"{environments[0][2]} of {total} multiprocessors each"
