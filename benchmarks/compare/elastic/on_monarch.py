"""A job that takes more workers while it runs, and gives them back, on the API that ours and torchmonarch share."""

from facts import fact, now
from task import FEW, MORE, ROUNDS, job

from monarch.actor import Actor, current_rank, endpoint, this_host


class Worker(Actor):
    @endpoint
    def run(self, first: int) -> int:
        return job(first + current_rank().rank)


def spawn(count: int) -> tuple[object, object]:
    procs = this_host().spawn_procs(per_host={"gpus": count})
    return procs, procs.spawn("workers", Worker)


meshes = [spawn(FEW)]
done = []
for number in range(ROUNDS):
    if number == ROUNDS // 3:
        began = now()
        meshes.append(spawn(MORE - FEW))
        meshes[-1][1].run.call(0).get()
        fact("grown ms", 1e3 * (now() - began))
    if number == 2 * ROUNDS // 3:
        began = now()
        meshes.pop()[0].stop().get()
        fact("shrunk ms", 1e3 * (now() - began))
    futures = []
    for _, workers in meshes:
        futures.append(workers.run.call(len(done) + FEW * len(futures)))
    for future in futures:
        done += [value for _, value in future.get().items()]
fact("results", len(done))
