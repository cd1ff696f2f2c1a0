"""The tensor engine of torchmonarch: the cost of an operation on two processes to its controller."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import monarch
from benchmarks.measure import figure, leave, plan_of
from monarch.actor import this_host


def main() -> None:
    plan = plan_of(sys.argv)
    count = max(20, plan.calls // 10)
    mesh = this_host().spawn_procs({"gpus": 2})
    with mesh.activate():
        t = torch.rand(64, 64)
        best = float("inf")
        for _ in range(3):
            monarch.fetch_shard(t, gpus=0).result()
            began = time.thread_time()
            for _ in range(count):
                t + t
            best = min(best, (time.thread_time() - began) / count)
        figure("tensors: add", us=best * 1e6)
    leave()


if __name__ == "__main__":
    main()
