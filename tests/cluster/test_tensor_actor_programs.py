"""Whole programs with values of ranks' own: trained inside of an actor, in stages of a pipeline, and with actors."""

from typing import Any

import pytest
import torch

import monarch_nb
from monarch_nb.actor import Actor, ProcMesh, context, endpoint
from tests.cluster.actor_tools import spawned

pytestmark = pytest.mark.timeout(180)


class Bandit(Actor):
    """Learns which of three arms pays, with a policy on the mesh of its own processes."""

    def __init__(self) -> None:
        self.procs: Any = context().actor_instance.proc_mesh
        with self.procs.activate():
            torch.manual_seed(7)
            self.policy = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
            self.frozen = torch.nn.Linear(2, 3)
            for parameter in self.frozen.parameters():
                parameter.requires_grad = False
            self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05, fused=True)

    @endpoint
    async def step(self) -> tuple[float, float]:
        with self.procs.activate():
            inputs = torch.randn(4, 2, device="cpu").repeat_interleave(8, 0)
            with torch.no_grad():
                drawn = torch.multinomial(torch.softmax(self.policy(inputs), -1), num_samples=1).squeeze(-1)
            paid = (drawn == 2).float()
            advantage = (paid - paid.mean()) / (paid.std() + 1e-6)
            logs = torch.log_softmax(self.policy(inputs), dim=-1)
            chosen = logs.gather(1, drawn.unsqueeze(-1)).squeeze(-1)
            penalty = 0.01 * (logs.exp() * (logs - torch.log_softmax(self.frozen(inputs), -1))).sum(-1).mean()
            loss: Any = penalty - (chosen * advantage).mean()
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            values = await monarch_nb.fetch_shard((loss.detach(), paid.mean()))
        return values[0].item(), values[1].item()


def test_an_actor_trains_on_the_mesh_of_its_own_processes() -> None:
    for procs in spawned(1, "bandits"):
        bandit: Any = procs.spawn("bandit", Bandit)
        steps = [bandit.step.call_one().get(60) for _ in range(40)]
        assert all(isinstance(loss, float) for loss, _ in steps)
        assert sum(paid for _, paid in steps[-5:]) / 5 > 0.9
        assert sum(paid for _, paid in steps[:5]) / 5 < 0.9


def test_a_pipeline_of_stages_computes_what_one_process_does() -> None:
    for procs in spawned(4, "stages"):
        grid = procs.split(gpus=("stage", "data"), data=2)
        with grid.activate():  # the first operation is an exchange
            x = torch.arange(6.0).reshape(3, 2) + grid.rank_tensor(["stage", "data"])
            along = [x.reduce(dim) for dim in ("stage", "data")]
        parts = [monarch_nb.inspect(x, stage=stage, data=data) for stage in range(2) for data in range(2)]
        assert torch.equal(monarch_nb.inspect(along[0], stage=1, data=0), parts[0] + parts[2])
        assert torch.equal(monarch_nb.inspect(along[1], stage=1, data=0), parts[2] + parts[3])
        stages: list[ProcMesh] = [grid.slice(stage=index) for index in range(grid.size("stage"))]
        models = []
        for stage in stages:
            with stage.activate():
                models.append(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)))
        with stages[0].activate():
            inputs: Any = torch.rand(3, 2)
        value = inputs
        with torch.no_grad():
            for stage, model in zip(stages, models, strict=True):
                value = value.to_mesh(stage)
                with stage.activate():
                    value = model(value)
        assert value.mesh.sizes == {"data": 2}
        for index in range(2):
            local = monarch_nb.inspect(inputs, data=index)
            for model in models:
                first, second = (monarch_nb.inspect((layer.weight, layer.bias), data=index) for layer in model[::2])
                local = torch.relu(local @ first[0].T + first[1]) @ second[0].T + second[1]
            torch.testing.assert_close(monarch_nb.inspect(value, data=index), local)


class Embedder(Actor):
    """Has a table, and adds its arguments to it."""

    def __init__(self, size: int) -> None:
        self.table = torch.arange(2.0 * size).reshape(size, 2)

    @endpoint(propagate=lambda ids: torch.empty(*ids.shape, 2))
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]

    @endpoint(propagate="inspect")
    def update(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        self.table.index_add_(0, ids, gradient, alpha=-0.1)

    @endpoint
    def row(self, index: int) -> list[float]:
        return self.table[index].tolist()


def test_actors_take_part_in_training_by_their_tensors() -> None:
    for procs in spawned(2, "embedders"):
        embedders: Any = procs.spawn("embedders", Embedder, 4)
        with procs.activate() as mesh:
            ids = torch.tensor([0, 1]) + mesh.rank_tensor("gpus")
        for _ in range(3):
            rows = embedders.look_up.rref(ids).requires_grad_()
            loss = (rows * rows).sum()
            loss.backward()
            total = rows.grad.reduce("gpus", "avg")
            embedders.update.rref(ids, total)
        tables = [torch.arange(8.0).reshape(4, 2) for _ in range(2)]
        for _ in range(3):
            gradients = [2 * table[rank : rank + 2] for rank, table in enumerate(tables)]
            mean = (gradients[0] + gradients[1]) / 2
            for rank, table in enumerate(tables):
                table[rank : rank + 2] -= 0.1 * mean
        for rank in range(2):
            rank_rows = [embedders.row.call(row).get(30).values()[rank] for row in range(4)]
            torch.testing.assert_close(torch.tensor(rank_rows), tables[rank])
