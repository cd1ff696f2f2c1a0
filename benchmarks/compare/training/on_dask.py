"""Data-parallel training of which a process is killed midway, on Dask."""

from dask.distributed import Client
from facts import fact, kill, now
from task import KILLED_AT, KILLED_RANK, RANKS, RATE, STEPS, gradient, loss, process, shard, start_weights

if __name__ == "__main__":
    client = Client(n_workers=RANKS, threads_per_worker=1, dashboard_address=None)
    shards = client.map(shard, range(RANKS))
    weights, killed = start_weights(), 0.0
    pids = list(client.run(process).values())
    client.gather(client.map(len, shards))
    began = now()
    for step in range(STEPS):
        if step == KILLED_AT:
            killed = now()
            kill(pids[KILLED_RANK])
        # What a dead worker held or did is done again elsewhere, and nothing raises.
        gradients = client.gather([client.submit(gradient, weights, rows) for rows in shards])
        if step == KILLED_AT:
            fact("goes on ms", 1e3 * (now() - killed))
        weights = weights - RATE * sum(gradients) / RANKS
    fact("seconds", now() - began)
    fact("loss", loss(weights))
    client.shutdown()
