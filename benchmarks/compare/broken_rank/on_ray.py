"""One rank of eight raises: what its user sees, on Ray."""

import ray
from facts import fact, now
from ray.exceptions import RayTaskError
from task import MANY, train_step


@ray.remote
class Trainer:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def step(self) -> float:
        return train_step(self.rank)


ray.init(num_cpus=MANY, include_dashboard=False)
trainers = [Trainer.remote(rank) for rank in range(MANY)]
ray.get([trainer.__ray_ready__.remote() for trainer in trainers])
began = now()
try:
    ray.get([trainer.step.remote() for trainer in trainers])
except RayTaskError as error:
    fact("seconds", now() - began)
    fact("what is said", error)
