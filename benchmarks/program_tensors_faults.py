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


def main() -> None:
    plan = plan_of(sys.argv)
    mesh = Mesh(shape=(4,), mesh_dim_names=("rank",))
    told: list[float] = []
    healed: list[float] = []
    for number in range(max(2, plan.kills // 3)):
        t = monarch.distribute(torch.ones(64, 64), mesh, ["rank", None])
        assert t.sum().item() == 64 * 64
        pids = list(mesh.execute(os.getpid).values())
        os.kill(pids[number % 4], signal.SIGKILL)
        began = time.perf_counter()
        try:
            while True:
                (t @ t.T).sum().item()
        except DeviceMeshError:
            told.append(time.perf_counter() - began)
        began = time.perf_counter()
        monarch.heal_mesh(mesh)
        assert mesh.ones(8, sharding_spec=["rank"]).sum().item() == 8
        healed.append(time.perf_counter() - began)
    times("tensors: kill told", told)
    times("tensors: kill healed", healed)
    mesh.stop().get(20)
    leave()


if __name__ == "__main__":
    main()
