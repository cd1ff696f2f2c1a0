"""A job that takes more workers while it runs, and gives them back, on Dask."""

from dask.distributed import Client
from facts import fact, now
from task import FEW, MORE, ROUNDS, job

if __name__ == "__main__":
    client = Client(n_workers=FEW, threads_per_worker=1, dashboard_address=None, memory_limit=0)
    done, count = [], FEW
    for number in range(ROUNDS):
        if number == ROUNDS // 3:
            began = now()
            count = MORE
            client.cluster.scale(count)
            client.wait_for_workers(count)
            fact("grown ms", 1e3 * (now() - began))
        if number == 2 * ROUNDS // 3:
            began = now()
            count = FEW
            client.cluster.scale(count)
            fact("shrunk ms", 1e3 * (now() - began))
        done += client.gather(client.map(job, range(len(done), len(done) + count)))
    fact("results", len(done))
    client.shutdown()
