"""Workers that take the parameters of a learner again and again, on Dask."""

from dask.distributed import Client, wait
from facts import fact, now
from task import RANKS, VERSIONS, check, parameters

if __name__ == "__main__":
    client = Client(n_workers=RANKS + 1, threads_per_worker=1, dashboard_address=None, memory_limit=0)
    learner, *generators = client.scheduler_info(n_workers=-1)["workers"]
    seconds = []
    for version in range(VERSIONS + 1):
        weights = client.submit(parameters, version, workers=learner)
        wait(weights)
        began = now()
        client.gather([client.submit(check, weights, version, workers=g, pure=False) for g in generators])
        seconds.append(now() - began)
    fact("ms a version", 1e3 * min(seconds[1:]))
    client.shutdown()
