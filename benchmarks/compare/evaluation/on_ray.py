"""Many evaluations on four workers, on Ray."""

import ray
from facts import fact, now, since_start
from task import POINTS, RANKS, objective

ray.init(num_cpus=RANKS, include_dashboard=False)
evaluate = ray.remote(objective)
ray.get([evaluate.remote(0) for _ in range(RANKS)])
fact("ready s", since_start())
began = now()
total = sum(ray.get([evaluate.remote(point) for point in POINTS]))
fact("seconds", now() - began)
fact("total", total)
ray.shutdown()
