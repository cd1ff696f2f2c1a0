"""A rank of a tensor mesh is killed in a step: when the program knows, and when a healed mesh computes."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import monarch
from benchmarks.measure import leave, plan_of, times
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError

_REPLACED_S = 6.0  # after which a spare has been replaced and is ready


def main() -> None:
    plan = plan_of(sys.argv)
    kills = max(2, plan.kills // 3)
    detection, healing = measured(Mesh(shape=(4,), mesh_dim_names=("rank",)), kills, 0.0)
    times("tensors: kill told", detection)
    times("tensors: kill healed", healing)
    _, healing = measured(Mesh(shape=(4,), mesh_dim_names=("rank",), name="spared", spares=1), kills, _REPLACED_S)
    times("tensors: kill healed by a spare", healing)
    leave()


def measured(mesh: Mesh, kills: int, pause: float) -> tuple[list[float], list[float]]:
    """Seconds until the program knows of a death, and from then until the healed mesh computes."""
    detection: list[float] = []
    healing: list[float] = []
    for number in range(kills):
        time.sleep(pause)
        t = monarch.distribute(torch.ones(64, 64), mesh, ["rank", None])
        assert t.sum().item() == 64 * 64
        pids = list(mesh.execute(os.getpid).values())
        os.kill(pids[number % 4], signal.SIGKILL)
        began = time.perf_counter()
        try:
            while True:
                (t @ t.T).sum().item()
        except DeviceMeshError:
            detection.append(time.perf_counter() - began)
        began = time.perf_counter()
        monarch.heal_mesh(mesh)
        assert mesh.ones(8, sharding_spec=["rank"]).sum().item() == 8
        healing.append(time.perf_counter() - began)
    mesh.stop().get(20)
    return detection, healing


if __name__ == "__main__":
    main()
