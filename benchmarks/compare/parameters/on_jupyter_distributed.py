"""Processes that take the parameters of the first one again and again, in cells of jupyter-distributed."""

# %%
import torch
import torch.distributed as dist
from facts import fact, now
from task import VERSIONS, check, parameters

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.from_numpy(parameters(0))

# %%
seconds = []
for version in range(1, VERSIONS + 1):
    if rank == 0:
        weights = torch.from_numpy(parameters(version))
    dist.barrier()
    began = now()
    dist.broadcast(weights, 0)
    check(weights.numpy(), version)
    dist.barrier()
    seconds.append(now() - began)
fact("ms a version", 1e3 * min(seconds))
