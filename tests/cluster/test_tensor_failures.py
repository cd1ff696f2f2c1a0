"""A process of a tensor mesh dies, or one rank fails alone: nobody waits for its messages, and the mesh goes on."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import monarch_nb
from monarch_nb.distributed import ContentsLostError, Mesh, MeshTensor, Plan, TensorError, load, save
from monarch_nb.exceptions import DeviceMeshError
from monarch_nb.tensor import processes
from monarch_nb.tensor.groups import coordinator
from tests.cluster.actor_tools import Faults, spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)

SOON_S = 5.0  # far more than a second, since these tests share the machine; far less than any time-out of PyTorch's


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    for procs in spawned(4, "tensors"):
        yield Mesh.of(procs.split(gpus=("dp", "tp"), tp=2))


def rows(mesh: Mesh, tensor: torch.Tensor) -> MeshTensor:
    """The tensor, cut along its first dimension."""
    return monarch_nb.distribute(tensor, mesh, ["dp", *[None] * (tensor.dim() - 1)])


def kill(mesh: Mesh, rank: int) -> None:
    os.kill(list(mesh.execute(os.getpid).values())[rank], signal.SIGKILL)


def repeat(step: Callable[[], float]) -> None:
    """Until it raises: a process that was killed may answer once more."""
    for _ in range(1000):
        step()


def fails_on_rank_three(shard: torch.Tensor) -> torch.Tensor:
    """The others wait in a collective that this rank never enters."""
    if dist.get_rank() == 3:
        raise MemoryError("out of memory here")
    dist.all_reduce(shard)
    return shard


def waits_on_the_last_rank(shard: torch.Tensor, waiting: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(waiting).touch()
        dist.all_reduce(shard)


def fails_on_the_last_rank(shard: torch.Tensor) -> None:
    """The other one is stopped."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise MemoryError("out of memory here")
    dist.all_reduce(shard)


@pytest.mark.slow
def test_a_rank_that_fails_alone_is_reported_and_nobody_waits(mesh: Mesh) -> None:
    matrix = torch.randn(8, 8)
    t, counter = rows(mesh, matrix), mesh.zeros(4)
    for round_ in range(2):
        began = time.monotonic()
        with pytest.raises(TensorError, match="MemoryError: out of memory here") as caught:
            mesh.execute(fails_on_rank_three, rows(mesh, torch.ones(4, 4)))
        took = time.monotonic() - began
        assert round_ == 0 or took < SOON_S  # the first use imports modules
        assert list(caught.value.failures) == [3]
        counter.add_(1)
        torch.testing.assert_close((t @ t.T).full_tensor(), matrix @ matrix.T)
        assert counter.tolist() == [1.0 + round_] * 4


@pytest.mark.slow
def test_a_death_in_a_compiled_step_breaks_the_mesh_until_healed(mesh: Mesh, faults: Faults, tmp_path: Path) -> None:
    nn = torch.nn
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    model = monarch_nb.module_to_mesh(net, mesh, Plan({"0": "column", "2": "row"}, data=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    x = rows(mesh, torch.ones(8, 4))

    @monarch_nb.compile
    def whole_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> float:
        return float(whole_step(x).item())

    saves = monarch_nb.checkpoint(model, optimizer, every=2, folder=str(tmp_path))
    losses = []
    for number in range(1, 6):
        losses.append(step())
        saves.step(number)
    saves.wait()
    assert whole_step.calls == 2
    kill(mesh, 1)
    began = time.monotonic()
    with pytest.raises(DeviceMeshError, match="gpus=1"):
        repeat(step)
    assert time.monotonic() - began < SOON_S
    with pytest.raises(DeviceMeshError, match="heal_mesh"):
        x.sum().item()
    assert monarch_nb.heal_mesh(mesh) is mesh
    assert x.sum().item() == 32  # the other rank of its row holds the same
    assert saves.restore() == 4
    assert step() == pytest.approx(losses[4])
    more = [step() for _ in range(4)]
    assert whole_step.calls > 2
    assert saves.restore() == 4
    assert [step() for _ in range(5)] == pytest.approx([losses[4], *more])
    faults.left()


SCRIPT = """
import os, signal, monarch, torch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError

mesh = Mesh(shape=(2,), mesh_dim_names=("rank",))
for victim in (0, 1, 0):
    t = monarch.distribute(torch.ones(8, 8), mesh, ["rank", None])
    os.kill(list(mesh.execute(os.getpid).values())[victim], signal.SIGKILL)
    try:
        while True:
            (t @ t.T).sum().item()
    except DeviceMeshError:
        mesh = monarch.heal_mesh(mesh)
print("went on", int(mesh.ones(4).sum().item()))
"""


@pytest.mark.slow
def test_a_script_goes_on_after_a_rank_died_and_was_healed(faults: Faults) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on 4\n"), done.stderr
    faults.left()


@pytest.mark.slow
def test_contents_are_restored_from_local_values_and_from_files(mesh: Mesh, faults: Faults, tmp_path: Path) -> None:
    t = mesh.zeros(4, 2, sharding_spec=["dp", "tp"])
    saved = {"t": mesh.arange(8, sharding_spec=[("dp", "tp")])}
    save(saved, tmp_path / "saved")
    kill(mesh, 3)
    with pytest.raises(DeviceMeshError):
        repeat(lambda: (t + 1).sum().item())
    monarch_nb.heal_mesh(mesh)
    with pytest.raises(ContentsLostError, match=r"saved = \{"):
        save(saved, tmp_path / "saved")
    with pytest.raises(TensorError):
        load({"other": saved["t"]}, tmp_path / "saved")
    with pytest.raises(ContentsLostError):
        saved["t"].tolist()
    load(saved, tmp_path / "saved")
    assert saved["t"].tolist() == list(range(8))
    t.copy_(torch.ones(4, 2))
    assert t.tolist() == [[1.0, 1.0]] * 4
    faults.left()


def test_slices_of_a_mesh_have_groups_of_their_own(mesh: Mesh) -> None:
    first, second = mesh.slice(dp=0), mesh.slice(tp=1)
    for part, name in ((first, "tp"), (second, "dp"), (mesh.slice(dp=1), "tp")):
        t = monarch_nb.distribute(torch.arange(4.0), part, [name])
        assert t.sum().item() == 6.0


@pytest.mark.slow
def test_a_process_stuck_in_an_ended_group_is_ended_too(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in (
        (coordinator, "LEAVE_TIMEOUT_S"),
        (coordinator, "ANSWER_TIMEOUT_S"),
        (coordinator, "_ANSWER_WAIT_S"),
        (coordinator, "MAX_BEHIND_S"),
    ):
        monkeypatch.setattr(module, limit, 0.5)
    for procs in spawned(2, "stayed"):
        dropped = Mesh.of(procs, ("dp",)).ones(4)
        del dropped
        gc.collect()
        mesh = Mesh.of(procs, ("dp",))  # its processes are in a group already, which is that of their meshes
        pids = mesh.execute(os.getpid).values()
        os.kill(pids[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeviceMeshError, match=r"killed: its process group was ended.*does not answer"):
            mesh.execute(fails_on_the_last_rank, mesh.ones(4))
        assert time.monotonic() - began < 2 * SOON_S
        monarch_nb.heal_mesh(mesh)
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)
        assert mesh.ones(4, sharding_spec=["dp"]).sum().item() == 4
    faults.left()


def test_workers_are_replaced_while_one_waits_in_a_collective(faults: Faults, tmp_path: Path) -> None:
    """As when a mesh shrinks before its coordinator has learned of the death."""
    for procs in spawned(2, "waiting"):
        mesh = Mesh.of(procs, ("dp",))
        waiting = tmp_path / "waiting"

        def wait(waiting: Path = waiting, mesh: Mesh = mesh) -> None:
            with contextlib.suppress(DeviceMeshError):
                mesh.execute(waits_on_the_last_rank, mesh.ones(4), str(waiting))

        thread = threading.Thread(target=wait)
        thread.start()
        until(waiting.exists)
        half = processes.shrunk(procs.slice(gpus=1), "cpu")
        assert [version for _, version in half.workers.version.call().get()] == [torch.__version__]
        thread.join()
    faults.left()


def test_survivors_of_a_mesh_go_on_without_the_dead_rank(faults: Faults) -> None:
    for procs in spawned(2, "halved"):
        mesh = Mesh.of(procs, ("dp",))
        t = mesh.zeros(4, sharding_spec=["dp"])
        kill(mesh, 0)
        with pytest.raises(DeviceMeshError):
            repeat(lambda t=t: (t + 1).sum().item())
        half = monarch_nb.heal_mesh(mesh, shrink=True)
        assert (half.shape, half.execute(os.getpid).extent) == ((1,), {"dp": 1})
        assert half.arange(4, sharding_spec=["dp"]).sum().item() == 6
        with pytest.raises(ContentsLostError, match="shrunk"):
            t.sum()
    faults.left()
