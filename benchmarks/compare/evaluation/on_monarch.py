"""Many evaluations on four workers, on the API that ours and torchmonarch share."""

from facts import fact, now, since_start
from task import POINTS, RANKS, objective

from monarch.actor import Actor, current_rank, endpoint, this_host


class Evaluator(Actor):
    @endpoint
    def evaluate(self, points: list[int]) -> float:
        return sum(objective(point) for point in points[current_rank().rank :: RANKS])


procs = this_host().spawn_procs(per_host={"gpus": RANKS})
evaluators = procs.spawn("evaluators", Evaluator)
evaluators.evaluate.call([]).get()
fact("ready s", since_start())
began = now()
total = sum(part for _, part in evaluators.evaluate.call(POINTS).get().items())
fact("seconds", now() - began)
fact("total", total)
procs.stop().get()
