"""One rank of eight raises: what its user sees, on ipyparallel."""

import ipyparallel
from facts import fact, now
from task import MANY

with ipyparallel.Cluster(n=MANY) as engines:
    view = engines[:]
    view.scatter("rank", range(MANY), flatten=True, block=True)
    view.execute("from task import train_step", block=True)
    began = now()
    try:
        view.execute("train_step(rank)", block=True)
    except ipyparallel.CompositeError as error:
        fact("seconds", now() - began)
        fact("what is said", error)
