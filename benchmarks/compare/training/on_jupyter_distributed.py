"""Data-parallel training of which a process is killed midway, in cells of jupyter-distributed."""

# %%
import torch
import torch.distributed as dist
from facts import fact, kill, now
from task import KILLED_AT, KILLED_RANK, RANKS, RATE, STEPS, gradient, loss, process, shard, start_weights

dist.init_process_group("gloo")
rank = dist.get_rank()
rows, weights, step = shard(rank), torch.tensor(start_weights()), 0

# %%
began = now()
while step < STEPS:
    if step == KILLED_AT and rank == KILLED_RANK:
        kill(process())
    part = torch.tensor(gradient(weights.numpy(), rows))
    dist.all_reduce(part)
    weights, step = weights - RATE * part / RANKS, step + 1
fact("seconds", now() - began)
fact("loss", loss(weights.numpy()))

# %%
fact("loss", loss(weights.numpy()))
