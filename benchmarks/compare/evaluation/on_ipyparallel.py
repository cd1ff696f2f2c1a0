"""Many evaluations on four workers, on ipyparallel."""

import ipyparallel
from facts import fact, now, since_start
from task import POINTS, RANKS, objective

with ipyparallel.Cluster(n=RANKS) as engines:
    view = engines.load_balanced_view()
    view.map_sync(objective, [0] * RANKS)
    fact("ready s", since_start())
    began = now()
    total = sum(view.map_sync(objective, POINTS))
    fact("seconds", now() - began)
    fact("total", total)
