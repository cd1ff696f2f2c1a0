"""The step of `tensor_model` as every rank's own program, for torchrun: a single controller is measured against it."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import times
from benchmarks.tensor_model import ROWS_OF_BATCH, SMALL, stepper


def main() -> None:
    options = json.loads(sys.argv[1])
    steps, compiled = options["steps"], options["compiled"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = lambda tensor, placements: distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # noqa: E731
    step = stepper(place, SMALL, **ROWS_OF_BATCH, compiled=torch.compile) if compiled else stepper(place)
    seconds, loss = [], None
    for number in range(steps + 4):
        began = time.perf_counter()
        loss = step().full_tensor().item()
        if number >= 4:
            seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        times("tensors: step, torchrun" + ", compiled" * compiled, seconds)
        print(f"loss {loss:.4f}", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
