"""Data-parallel training of which a process is killed midway, on Ray."""

import os

import ray
from facts import fact, kill, now
from ray.exceptions import RayActorError
from task import KILLED_AT, KILLED_RANK, RANKS, RATE, STEPS, gradient, loss, shard, start_weights


@ray.remote(max_restarts=-1)
class Trainer:
    def __init__(self, rank: int) -> None:
        self.rows = shard(rank)

    def gradient(self, weights: object) -> object:
        return gradient(weights, self.rows)

    def pid(self) -> int:
        return os.getpid()


ray.init(num_cpus=RANKS, include_dashboard=False)
trainers = [Trainer.remote(rank) for rank in range(RANKS)]
weights, step, killed = start_weights(), 0, 0.0
pids = ray.get([trainer.pid.remote() for trainer in trainers])
told = False
began = now()
while step < STEPS:
    if step == KILLED_AT and not killed:
        killed = now()
        kill(pids[KILLED_RANK])
    try:
        gradients = ray.get([trainer.gradient.remote(weights) for trainer in trainers])
    except RayActorError as error:  # it is started again by itself; calls fail until it is there
        if not told:
            fact("told ms", 1e3 * (now() - killed))
            fact("what is said", error)
            told = True
        continue
    if step == KILLED_AT:
        fact("goes on ms", 1e3 * (now() - killed))
    weights, step = weights - RATE * sum(gradients) / RANKS, step + 1
fact("seconds", now() - began)
fact("loss", loss(weights))
