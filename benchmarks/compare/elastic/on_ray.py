"""A job that takes more workers while it runs, and gives them back, on Ray."""

import ray
from facts import fact, now
from task import FEW, MORE, ROUNDS, job


@ray.remote(num_cpus=1)
class Worker:
    def run(self, number: int) -> int:
        return job(number)


ray.init(num_cpus=MORE, include_dashboard=False)
workers = [Worker.remote() for _ in range(FEW)]
done = []
for number in range(ROUNDS):
    if number == ROUNDS // 3:
        began = now()
        workers += [Worker.remote() for _ in range(MORE - FEW)]
        ray.get([worker.run.remote(0) for worker in workers])
        fact("grown ms", 1e3 * (now() - began))
    if number == 2 * ROUNDS // 3:
        began = now()
        for worker in workers[FEW:]:
            ray.kill(worker)
        del workers[FEW:]
        fact("shrunk ms", 1e3 * (now() - began))
    done += ray.get([worker.run.remote(len(done) + i) for i, worker in enumerate(workers)])
fact("results", len(done))
