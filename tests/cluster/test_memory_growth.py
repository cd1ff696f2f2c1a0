"""Memory that grows on real ranks, and the line that allocates it."""

import pytest
import torch

import monarch_nb
from monarch_nb.actor import Actor, ActorError, endpoint, this_host
from monarch_nb.diagnosis import MemoryWatch, compare_memory
from monarch_nb.distributed import Mesh, TensorError
from monarch_nb.gpu import driver
from monarch_nb.gpu.pretence import PretenceDriver
from tests.cluster.actor_tools import SECONDS, line_of

pytestmark = pytest.mark.timeout(180)


class Trainer(Actor):
    """Trains, and keeps too much on request."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.losses: list[torch.Tensor] = []
        self.texts: list[list[str]] = []
        self.on_gpu: torch.UntypedStorage | None = None

    @endpoint
    def step(self, keeps: str, number: int) -> None:
        for _ in range(number):
            loss = self.net(torch.randn(512, 64)).square().mean()
            loss.backward(retain_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if keeps == "graph":
                self.losses.append(loss)
            elif keeps == "objects":
                self.texts.append([str(each) * 9 for each in range(600)])

    @endpoint
    def hold(self, size: int) -> None:
        self.held = torch.ones(size)

    @endpoint
    def use_gpu(self, megabytes: int, share: float) -> None:
        gpu = driver()
        assert isinstance(gpu, PretenceDriver)
        self.on_gpu = None  # frees what it had
        self.on_gpu = gpu.new_storage(megabytes << 20, 0)
        gpu.share, gpu.others = share, 100 << 20


@pytest.mark.parametrize(
    ("keeps", "line", "kind"), [("graph", "randn(512, 64)", "tensors"), ("objects", "str(each) * 9", "objects")]
)
def test_the_line_that_allocates_what_stays_is_found(keeps: str, line: str, kind: str) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.step.call("", 2).get(SECONDS)
    with MemoryWatch(trainers) as watch:
        trainers.slice(gpus=1).step.call(keeps, 60).get(SECONDS)
    (finding,) = watch.diagnosis.findings
    assert (finding.kind, finding.ranks, finding.mesh, finding.sure) == ("memory", (1,), "trainers", True)
    assert finding.source.endswith(line_of(__file__, line))
    assert kind in finding.text
    with MemoryWatch(trainers) as watch:
        trainers.step.call("", 20).get(SECONDS)
    assert watch.diagnosis.findings == (), watch
    procs.stop().get(SECONDS)


def test_a_rank_that_uses_much_more_is_named_while_it_runs() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.hold.call(10).get(SECONDS)
    trainers.slice(gpus=2).hold.call(200_000_000).get(SECONDS)
    (finding,) = compare_memory(trainers).findings
    assert (finding.kind, finding.ranks, finding.sure) == ("memory", (2,), False)
    assert "1 tensor float32 [200000000] take" in finding.text
    procs.stop().get(SECONDS)


def test_a_peak_is_named_by_parameter_and_module() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    with MemoryWatch(trainers) as watch:
        trainers.step.call("", 3).get(SECONDS)
    assert watch.peaks.keys() == {0, 1}
    sizes = {(part.held.kind, part.held.name): part.held.size for part in watch.peaks[0][0].parts}
    assert sizes["parameters", "Linear.weight"] == 64 * 64 * 4
    assert sizes["optimizer states", "AdamW exp_avg of Linear.weight"] == 64 * 64 * 4
    assert sizes["activations", "Linear"] == 512 * 64 * 4
    text = str(watch)
    assert "the highest peak of tensors was that of gpus=" in text
    assert "parameters 16.2 kB: Linear.weight 16.0 kB, Linear.bias 256 B" in text
    procs.stop().get(SECONDS)


def test_a_peak_of_sharded_tensors_has_the_names_of_the_program() -> None:
    procs = this_host().spawn_procs(per_host={"data": 2}, name="trainers")
    mesh = Mesh.of(procs)
    model = monarch_nb.module_to_mesh(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = monarch_nb.distribute(torch.ones(64, 64), mesh, ["data", None])
    with MemoryWatch(mesh) as watch:
        for _ in range(2):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        mesh.synchronise()
    assert watch.peaks.keys() == {0, 1}
    sizes = {(part.held.kind, part.held.name): part.held.size for part in watch.peaks[0][0].parts}
    assert sizes["parameters", "Sequential.0.weight"] == 64 * 512 * 4
    assert sizes["optimizer states", "AdamW exp_avg of Sequential.0.weight"] == 64 * 512 * 4
    blocks = [part.held for part in watch.peaks[0][0].parts if part.held.kind == "made in backward passes"]
    assert ("Sequential.1", 64 * 512 * 4) in [(block.name, block.size) for block in blocks]
    line = line_of(__file__, "model(rows)" + ".square()").rpartition("/")[2]
    assert f" at {line}" in str(watch)
    assert "the highest peak of tensors was that of data=" in str(watch)
    procs.stop().get(SECONDS)


def test_tensors_of_ranks_have_the_names_of_the_program() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    with procs.activate() as mesh:
        model = torch.nn.Linear(64, 512)
        with MemoryWatch(mesh) as watch:
            model(torch.rand(16, 64)).square().sum().backward()
            monarch_nb.inspect(model.bias)
        sizes = {(part.held.kind, part.held.name): part.held.size for part in watch.peaks[1][0].parts}
        assert sizes["parameters", "Linear.weight"] == sizes["gradients", "Linear.weight"] == 64 * 512 * 4
        assert "2 ranks of trainers for" in str(watch)
        with pytest.raises(TensorError, match="hold on rank 0, by name") as raised:
            monarch_nb.inspect(torch.empty(1 << 58))
    assert "parameters 130 kB: Linear.weight 128 kB, Linear.bias 2.00 kB" in str(raised.value)
    procs.stop().get(SECONDS)


def test_an_endpoint_without_memory_raises_what_holds_it() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.step.call("", 1).get(SECONDS)
    with pytest.raises(ActorError, match="can't allocate memory") as raised:
        trainers.hold.call_one(1 << 60).get(SECONDS)
    text = str(raised.value)
    assert "What holds the memory of this process, by name:" in text
    assert "parameters 16.2 kB: Linear.weight 16.0 kB, Linear.bias 256 B" in text
    assert "optimizer states" in text
    procs.stop().get(SECONDS)


def test_an_operation_without_memory_raises_what_holds_it() -> None:
    procs = this_host().spawn_procs(per_host={"data": 2}, name="trainers")
    mesh = Mesh.of(procs)
    model = monarch_nb.module_to_mesh(torch.nn.Linear(64, 512), mesh)
    ones = monarch_nb.distribute(torch.ones(300, 4), mesh)
    with pytest.raises(TensorError, match="can't allocate memory") as raised:
        torch.empty(1 << 58, device=mesh.device).sum().item()
    text = str(raised.value)
    assert "hold on rank" in text
    assert "parameters 130 kB: Linear.weight 128 kB, Linear.bias 2.00 kB" in text
    assert "other tensors 4.69 kB: float32 [300, 4] 4.69 kB" in text
    assert float((ones + model.bias[0].detach()).sum()) != 0, "the mesh is usable"
    procs.stop().get(SECONDS)


def test_what_ranks_have_on_a_gpu_is_compared() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, env={"MONARCH_NB_GPU": "pretence"}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.use_gpu.call(64, 0.5).get(SECONDS)
    diagnosis = compare_memory(trainers)
    assert "on GPUs 64.0 MB (0 B in tensors), busy for 50 % of the time" in diagnosis.inspected
    assert "parameters 16.2 kB: Linear.weight 16.0 kB" in diagnosis.inspected
    assert diagnosis.findings == ()
    trainers.slice(gpus=1).use_gpu.call_one(900, 1.0).get(SECONDS)
    (finding,) = compare_memory(trainers).findings
    assert finding.ranks == (1,)
    assert "in use by it, 100 MB by other processes" in finding.text
    procs.stop().get(SECONDS)
