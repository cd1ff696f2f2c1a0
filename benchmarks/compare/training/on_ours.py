"""Data-parallel training of which a process is killed midway, on ours."""

import os

from facts import fact, kill, now
from task import KILLED_AT, KILLED_RANK, RANKS, RATE, STEPS, gradient, loss, shard, start_weights

import monarch.actor
from monarch import heal_mesh
from monarch.actor import Actor, SupervisionError, current_rank, endpoint, this_host

monarch.actor.unhandled_fault_hook = lambda failure: None  # in a script; in a notebook deaths are shown


class Trainer(Actor):
    def __init__(self) -> None:
        self.rows = shard(current_rank().rank)

    @endpoint
    def gradient(self, weights: object) -> object:
        return gradient(weights, self.rows)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


trainers = this_host().spawn_procs(per_host={"gpus": RANKS}).spawn("trainers", Trainer)
weights, step, killed = start_weights(), 0, 0.0
pids = [pid for _, pid in trainers.pid.call().get().items()]
began = now()
while step < STEPS:
    if step == KILLED_AT and not killed:
        killed = now()
        kill(pids[KILLED_RANK])
    try:
        gradients = [part for _, part in trainers.gradient.call(weights).get().items()]
    except SupervisionError as error:
        fact("told ms", 1e3 * (now() - killed))
        fact("what is said", error)
        heal_mesh(trainers)
        continue
    if step == KILLED_AT:
        fact("goes on ms", 1e3 * (now() - killed))
    weights, step = weights - RATE * sum(gradients) / RANKS, step + 1
fact("seconds", now() - began)
fact("loss", loss(weights))
