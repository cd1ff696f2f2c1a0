"""The step of `tensor_model` as every rank's own program, for torchrun: a single controller is measured against it."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.measure import times
from tests.benchmarks.tensor_model import stepper


def main() -> None:
    steps = json.loads(sys.argv[1])["steps"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    step = stepper(lambda tensor, placements: distribute_tensor(tensor, mesh, placements, src_data_rank=None))
    seconds, loss = [], None
    for at in range(steps + 3):
        began = time.perf_counter()
        loss = step().full_tensor().item()
        if at >= 3:
            seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        times("tensors: step, torchrun", seconds)
        print(f"loss {loss:.4f}", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
