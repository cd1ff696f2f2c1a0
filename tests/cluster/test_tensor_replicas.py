"""A process of a tensor mesh dies, and the new one receives what other ranks hold as well."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import monarch_nb
from monarch_nb.distributed import ContentsLostError, Mesh, MeshTensor
from monarch_nb.exceptions import DeviceMeshError
from monarch_nb.tensor import replicas
from monarch_nb.tensor.workers import session
from tests.cluster.actor_tools import spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(180)


def meshes(name: str) -> Iterator[Mesh]:
    for procs in spawned(4, name):
        yield Mesh.of(procs.split(gpus=("replica", "shard"), shard=2))


def kill(mesh: Mesh, *ranks: int) -> None:
    pids = list(mesh.execute(os.getpid).values())
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


def until_broken(mesh: Mesh) -> None:
    def use() -> None:
        for _ in range(1000):  # a process that was killed may answer once more
            mesh.ones(4, sharding_spec=["shard"]).sum().item()

    with pytest.raises(DeviceMeshError):
        use()


def kill_and_heal(mesh: Mesh, *ranks: int) -> None:
    """Ranks are killed while all operations have run, and the mesh is healed."""
    kill(mesh, *ranks)
    until_broken(mesh)
    monarch_nb.heal_mesh(mesh)


def train(mesh: Mesh, steps: int, faults: dict[tuple[int, str], int]) -> dict[str, torch.Tensor]:
    """The parameters and the optimizer's state after a training in which ranks die, by step and phase."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)).to(mesh.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saves = monarch_nb.checkpoint(model, optimizer, every=1, folder=None)
    saves.save(0)
    number, healed = 0, 0

    def phase(name: str) -> None:
        rank = faults.pop((number, name), None)
        if rank is not None:
            kill(mesh, rank)

    while number < steps:
        try:
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            x = monarch_nb.distribute(batch, mesh, [("replica", "shard"), None])
            phase("forward")
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            phase("update")
            optimizer.step()
            phase("save")
            saves.step(number + 1)
            number += 1
        except DeviceMeshError:
            monarch_nb.heal_mesh(mesh)
            number, healed = saves.restore() or 0, healed + 1
    assert not faults
    state = {name: tensor.full_tensor() for name, tensor in model.named_parameters() if isinstance(tensor, MeshTensor)}
    for index, values in enumerate(optimizer.state.values()):
        state |= {f"{index}.{key}": torch.as_tensor(tensor.cpu()) for key, tensor in values.items()}
    assert len(state) == 4 + 3 * 4
    return state


@pytest.mark.slow
def test_a_training_with_deaths_ends_as_one_without() -> None:
    faults = {(1, "forward"): 3, (2, "update"): 0, (4, "save"): 2}
    for mesh in meshes("trained"):
        state = train(mesh, 6, faults)
        expected = train(mesh, 6, {})
        assert {name for name, values in expected.items() if not torch.equal(values, state[name])} == set()


def test_a_new_process_receives_what_other_ranks_hold() -> None:
    values = torch.randn(8, 6)
    for mesh in meshes("replicas"):
        full = monarch_nb.distribute(values, mesh, [None, None])
        half = monarch_nb.distribute(values, mesh, ["shard", None])
        only = monarch_nb.distribute(values, mesh, ["replica", "shard"])
        row, turned, part, cut = full[2], full.t(), half[1:3], only[1:3]  # the last two are copies on the processes
        full.add_(1)
        half.mul_(2)  # which makes it stale
        kill_and_heal(mesh, 3)
        assert torch.equal(full.full_tensor(), values + 1)
        assert torch.equal(half.full_tensor(), values * 2)
        assert torch.equal(part.full_tensor(), 2 * values[1:3])
        row.zero_()
        for shard in turned.local_shards().values():  # in the new process, too, they are views
            assert torch.equal(shard[:, 2], torch.zeros(6))
        with pytest.raises(ContentsLostError, match=r"(?s)only = monarch.*its part on rank 3 of the mesh"):
            only.sum()
        with pytest.raises(ContentsLostError, match="of which it is a view is lost"):
            cut.sum()
        only.copy_(values)
        kill_and_heal(mesh, 0, 1)  # the copy that rank 3 received goes on to another
        assert torch.equal(half.full_tensor(), values * 2)
        with pytest.raises(ContentsLostError):
            only.sum()
        kill_and_heal(mesh, 1, 3)  # both that hold the same part
        assert torch.equal(turned.full_tensor()[:, 3], values[3] + 1)
        with pytest.raises(ContentsLostError, match=r"half = monarch"):
            half.sum()


def waits(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)


def test_a_tensor_with_an_unfinished_write_is_lost(tmp_path: Path) -> None:
    for mesh in meshes("unfinished"):
        base, ones = mesh.zeros(4, 4), mesh.ones(4)
        pids = list(mesh.execute(os.getpid).values())

        def wait(mesh: Mesh = mesh) -> None:
            with contextlib.suppress(DeviceMeshError):
                mesh.execute(waits, str(tmp_path))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: len(os.listdir(tmp_path)) == 4)
        base[1].add_(mesh.ones(4, sharding_spec=["replica"]))  # in a view that is freed at once, of what others have
        mesh.stream.flush()
        os.kill(pids[2], signal.SIGKILL)
        thread.join()
        (tmp_path / "go").touch()
        monarch_nb.heal_mesh(mesh)
        with pytest.raises(ContentsLostError, match="writes to it, has not run"):
            base.sum()
        assert ones.tolist() == [1.0] * 4


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails(*_: object) -> None:
    raise MemoryError("no memory here")


def instead_of_sending(call: Callable[..., None] | None, rank: int) -> None:
    if dist.get_rank() == rank:
        session.send = call or replicas.send


@pytest.mark.slow
def test_a_death_or_an_error_while_contents_are_restored() -> None:
    for mesh in meshes("again"):
        full, half = mesh.ones(4), mesh.ones(4, 2, sharding_spec=["shard", None])
        mesh.execute(instead_of_sending, dies, 1)
        kill_and_heal(mesh, 3)
        with pytest.raises(DeviceMeshError):
            full.sum()  # rank 1 has the same part of both, and dies
        monarch_nb.heal_mesh(mesh)
        assert full.tolist() == [1.0] * 4
        with pytest.raises(ContentsLostError, match="its part on rank 1 of the mesh was on no other rank"):
            half.sum()
        mesh.execute(instead_of_sending, fails, 0)
        kill_and_heal(mesh, 2)
        with pytest.raises(ContentsLostError, match="could not be restored from other ranks: MemoryError: no memory"):
            full.sum()
        mesh.execute(instead_of_sending, None, 0)
        assert mesh.arange(4, sharding_spec=["replica"]).sum().item() == 6
