"""Workers that take the parameters of a learner again and again, on ipyparallel."""

import ipyparallel
from facts import fact, now
from task import RANKS, VERSIONS, check, parameters

with ipyparallel.Cluster(n=RANKS + 1) as engines:
    learner, generators = engines[0], engines[1:]
    seconds = []
    for version in range(VERSIONS + 1):
        learner.apply_sync(parameters, version)  # as a learner has them in the end
        began = now()
        weights = learner.apply_sync(parameters, version)  # to the controller, and from there to each
        generators.apply_sync(check, weights, version)
        seconds.append(now() - began)
    fact("ms a version", 1e3 * min(seconds[1:]))
