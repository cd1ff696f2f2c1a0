"""Many evaluations on four workers, on Dask."""

from dask.distributed import Client
from facts import fact, now, since_start
from task import POINTS, RANKS, objective

if __name__ == "__main__":
    client = Client(n_workers=RANKS, threads_per_worker=1, dashboard_address=None)
    client.gather(client.map(objective, range(RANKS), pure=False))
    fact("ready s", since_start())
    began = now()
    total = sum(client.gather(client.map(objective, POINTS, pure=False)))
    fact("seconds", now() - began)
    fact("total", total)
    client.shutdown()
