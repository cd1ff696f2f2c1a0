"""Many processes with many actors each: spawned, called, one killed, healed, stopped. Runs on ours and torchmonarch."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from measure import figure, leave, plan_of

import monarch.actor
from monarch.actor import Actor, endpoint, this_host

heal_mesh = getattr(monarch.actor, "heal_mesh", None)


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@contextlib.contextmanager
def timed(row: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    figure(row, value=time.perf_counter() - began)


def main() -> None:
    plan = plan_of(sys.argv)
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with timed("scale: spawned"):
        procs = this_host().spawn_procs(per_host={"gpus": plan.scale})
        meshes = [procs.spawn(f"workers{number}", Worker) for number in range(plan.scale_actors)]
        for mesh in meshes:
            mesh.pid.call().get()
    with timed("scale: all called"):
        for future in [mesh.pid.call() for mesh in meshes]:
            pids = [pid for _, pid in future.get().items()]
    assert len(set(pids)) == plan.scale
    if heal_mesh is None:
        leave()
    began = time.perf_counter()
    os.kill(pids[plan.scale // 2], signal.SIGKILL)
    for mesh in meshes:
        try:
            while True:
                mesh.pid.call().get()
        except monarch.actor.SupervisionError:
            pass
    figure("scale: told", value=time.perf_counter() - began)
    with timed("scale: healed"):
        heal_mesh(procs)
        again = [[pid for _, pid in mesh.pid.call().get().items()] for mesh in meshes]
    changed = {rank for pids_now in again for rank, pid in enumerate(pids_now) if pid != pids[rank]}
    assert changed == {plan.scale // 2}
    with timed("scale: stopped"):
        procs.stop().get()


if __name__ == "__main__":
    main()
