"""Data-parallel training of which a process is killed midway, on ipyparallel."""

import ipyparallel
from facts import fact, kill, now
from task import KILLED_AT, KILLED_RANK, RANKS, RATE, STEPS, gradient, loss, process, start_weights


def ready(engines):
    view = engines[:]
    view.execute("from task import *", block=True)
    view.scatter("rank", range(RANKS), flatten=True, block=True)
    view.execute("rows = shard(rank)", block=True)
    return view


with ipyparallel.Cluster(n=RANKS) as engines:
    cluster = engines.cluster
    view = ready(engines)
    weights, step, killed = start_weights(), 0, 0.0
    pids = view.apply_sync(process)
    began = now()
    while step < STEPS:
        if step == KILLED_AT and not killed:
            killed = now()
            kill(pids[KILLED_RANK])
        try:
            gradients = view.apply_sync(gradient, weights, ipyparallel.Reference("rows"))
        except (ipyparallel.CompositeError, ipyparallel.EngineError) as error:
            fact("told ms", 1e3 * (now() - killed))
            fact("what is said", error)
            cluster.restart_engines_sync()  # nobody starts the one that is missing alone
            engines.wait_for_engines(RANKS)
            view = ready(engines)
            continue
        if step == KILLED_AT:
            fact("goes on ms", 1e3 * (now() - killed))
        weights, step = weights - RATE * sum(gradients) / RANKS, step + 1
    fact("seconds", now() - began)
    fact("loss", loss(weights))
