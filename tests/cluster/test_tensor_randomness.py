"""Random numbers: processes that come from one template draw different ones, and meshes of tensors their own."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import monarch_nb as monarch
from monarch_nb.actor import Actor, ProcMesh, endpoint, heal_mesh, this_host
from monarch_nb.distributed import Mesh
from tests.cluster.actor_tools import Faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
SECONDS = 60.0


class Dice(Actor):
    @endpoint
    def draw(self) -> dict[str, object]:
        """The next numbers of each generator that a module of this process holds, and what training makes of them."""
        draws: dict[str, object] = {
            "torch": torch.rand(2).tolist(),
            "weights": torch.nn.Linear(3, 3).weight.flatten().tolist(),
            "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
            "numpy": np.random.rand(2).tolist(),
            "random": random.random(),
        }
        for name, module in tuple(sys.modules.items()):
            for key, value in tuple(vars(module).items()):
                if type(value) is random.Random:
                    draws[f"{name}.{key}"] = value.random()
                elif isinstance(value, np.random.RandomState):
                    draws[f"{name}.{key}"] = float(value.rand())
                elif type(value) is torch.Generator:
                    draws[f"{name}.{key}"] = torch.rand(1, generator=value).item()
        return draws

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def spawned(name: str, count: int = 4, **options: Any) -> ProcMesh:
    return this_host().spawn_procs(per_host={"gpus": count}, name=name, **options)


def draw(mesh: Any) -> list[dict[str, Any]]:
    return list(mesh.draw.call().get(SECONDS).values())


def assert_all_different(draws: list[dict[str, Any]]) -> None:
    assert all(draw.keys() == draws[0].keys() for draw in draws)
    for name in draws[0]:
        values = [draw[name] for draw in draws]
        assert all(values.count(value) == 1 for value in values), (name, values)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = spawned("left")
    yield mesh
    mesh.stop().get(SECONDS)


def test_all_ranks_of_all_meshes_draw_different_numbers(procs: ProcMesh) -> None:
    second = spawned("right")
    draws = [*draw(procs.spawn("dice", Dice)), *draw(second.spawn("dice", Dice))]
    assert len(draws) == 8
    assert "sympy.core.random.rng" in draws[0]  # modules that templates import later are included
    assert_all_different(draws)
    second.stop().get(SECONDS)


def test_a_healed_rank_draws_others_too(faults: Faults) -> None:
    mesh = spawned("mended", 2)
    dice: Any = mesh.spawn("dice", Dice)
    before = draw(dice)
    os.kill(dice.pid.call().get(SECONDS).values()[1], signal.SIGKILL)
    faults.next()
    heal_mesh(dice)
    assert_all_different([*before, *draw(dice)])
    mesh.stop().get(SECONDS)


def test_a_seed_of_the_program_stays() -> None:
    def bootstrap() -> None:
        np.random.seed(8)
        random.seed(9)

    mesh = spawned("seeded", 2, setup="import torch; torch.manual_seed(7)", bootstrap=bootstrap)
    first, second = draw(mesh.spawn("dice", Dice))
    assert first == {**second, **{name: value for name, value in first.items() if name.startswith("sympy.")}}
    assert first["torch"] == torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
    assert first["numpy"] == np.random.RandomState(8).rand(2).tolist()
    assert first["random"] == random.Random(9).random()
    mesh.stop().get(SECONDS)


def test_operations_on_a_mesh_leave_the_generators_of_its_processes_alone(procs: ProcMesh) -> None:
    mesh = Mesh.of(procs)
    torch.manual_seed(1)
    mesh.rand(4)  # equal on all ranks, which are replicas
    seeds = mesh.execute(torch.initial_seed).values()
    assert len(set(seeds)) == 4
    draws = mesh.execute(torch.rand, 1).values()
    assert len({draw.item() for draw in draws}) == 4
    mesh.execute(torch.manual_seed, 5)
    monarch.compile(lambda: torch.nn.functional.dropout(mesh.ones(8)))()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert mesh.execute(torch.rand, 1).values() == [expected] * 4


def test_a_mesh_follows_the_programs_seed_even_if_set_before(procs: ProcMesh) -> None:
    def numbers(mesh: Mesh) -> list[float]:
        values: list[float] = mesh.rand(4).full_tensor().tolist()
        return values

    torch.manual_seed(11)
    first, second = Mesh.of(procs), Mesh.of(procs)
    before, beside = numbers(first), numbers(second)
    assert before != beside  # meshes of one program draw different numbers
    torch.manual_seed(11)
    assert numbers(first) == before == numbers(second)  # a seed determines the numbers of all
    assert numbers(Mesh.of(procs)) == before
    torch.manual_seed(12)
    assert numbers(Mesh.of(procs)) != before
    torch.seed()
    assert numbers(Mesh.of(procs)) != numbers(Mesh.of(procs))
