"""Workers that take the parameters of a learner again and again, on the API that ours and torchmonarch share."""

import numpy as np
import torch
from facts import fact, now
from task import PARAMETERS, RANKS, VERSIONS, check, parameters

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer


class Learner(Actor):
    def __init__(self) -> None:
        self.weights = torch.zeros(PARAMETERS, dtype=torch.uint8)

    @endpoint
    async def learn(self, version: int) -> RDMABuffer:
        self.weights.copy_(torch.from_numpy(parameters(version)))
        return RDMABuffer(self.weights)


class Generator(Actor):
    def __init__(self) -> None:
        self.weights = torch.zeros(PARAMETERS, dtype=torch.uint8)

    @endpoint
    async def take(self, buffer: RDMABuffer, version: int) -> int:
        await buffer.read_into(self.weights)
        return check(np.asarray(self.weights), version)


host = this_host()
learner = host.spawn_procs(per_host={"gpus": 1}).spawn("learner", Learner)
generators = host.spawn_procs(per_host={"gpus": RANKS}).spawn("generators", Generator)
generators.take.call(learner.learn.call_one(0).get(), 0).get()
seconds = []
for version in range(1, VERSIONS + 1):
    buffer = learner.learn.call_one(version).get()
    began = now()
    generators.take.call(buffer, version).get()
    seconds.append(now() - began)
fact("ms a version", 1e3 * min(seconds))
