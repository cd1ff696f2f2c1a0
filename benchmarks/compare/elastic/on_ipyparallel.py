"""A job that takes more workers while it runs, and gives them back, on ipyparallel."""

import time

import ipyparallel
from facts import fact, now
from task import FEW, MORE, ROUNDS, job

cluster = ipyparallel.Cluster()
engines = cluster.start_and_connect_sync(n=FEW)
done, count, added = [], FEW, ""
for number in range(ROUNDS):
    if number == ROUNDS // 3:
        began = now()
        count = MORE
        added = cluster.start_engines_sync(n=MORE - FEW)
        engines.wait_for_engines(count)
        fact("grown ms", 1e3 * (now() - began))
    if number == 2 * ROUNDS // 3:
        began = now()
        count = FEW
        cluster.stop_engines_sync(added)
        while len(engines.ids) > count:  # until its controller knows, tasks go to engines that are gone
            time.sleep(0.01)
        fact("shrunk ms", 1e3 * (now() - began))
    view = engines.load_balanced_view()
    done += view.map_sync(job, range(len(done), len(done) + count))
fact("results", len(done))
cluster.stop_cluster_sync()
