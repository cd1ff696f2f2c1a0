"""One rank of eight raises: what its user sees, on the API that ours and torchmonarch share."""

from facts import fact, now
from task import MANY, train_step

from monarch.actor import Actor, ActorError, current_rank, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self) -> float:
        return train_step(current_rank().rank)


trainers = this_host().spawn_procs(per_host={"gpus": MANY}).spawn("trainers", Trainer)
began = now()
try:
    trainers.step.call().get()
except ActorError as error:
    fact("seconds", now() - began)
    fact("what is said", error)
