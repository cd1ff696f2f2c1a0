"""One rank of eight raises: what its user sees, on Dask."""

from dask.distributed import Client
from facts import fact, now
from task import MANY, train_step

if __name__ == "__main__":
    client = Client(n_workers=MANY, threads_per_worker=1, dashboard_address=None, memory_limit=0)
    began = now()
    try:
        client.gather(client.map(train_step, range(MANY)))
    except ValueError as error:
        fact("seconds", now() - began)
        fact("what is said", error)
    client.shutdown()
