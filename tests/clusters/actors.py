"""Actors of the tests with real servers, and the steps that all servers share."""

import os
import signal
from pathlib import Path

from monarch_nb.actor import Actor, endpoint
from tests.clusters.console import Console
from tests.polling import until

COUNTS = "counters.add.call().get(90).values()"
SPAWN = f"""
from pathlib import Path
from tests.clusters.actors import Counter
from monarch_nb.actor import heal_mesh
hosts = job.state(None).trainers
procs = hosts.spawn_procs(name='pair')
counters = procs.spawn('counters', Counter)
{COUNTS}
"""


class Counter(Actor):
    """Counts calls, so that a rank that was started anew is told from one that lived on."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> tuple[int, int]:
        """How often it was called, and its process."""
        self.count += 1
        return self.count, os.getpid()


class Trainer(Actor):
    """Uses torch.distributed over the machines."""

    @endpoint
    def join(self) -> int:
        """Joins the others' group; its process."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return os.getpid()

    @endpoint
    def reduce(self, pipe: str, value: float = 1.0) -> float:
        """A sum over the ranks, into which the second one goes once somebody has written into a pipe."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value])
        if dist.get_rank() == 1:
            Path(pipe).read_bytes()
            tensor = tensor.log()
        dist.all_reduce(tensor)
        return tensor.item()


def get_another_key(console: Console) -> None:
    """The two hosts of `job` get another key while they work, and so does an agent that is started again."""
    first = console.ask(SPAWN)
    console.ask("file = Path(job._folder, 'key')\nformer = file.read_bytes()\nhosts.rotate_key()")
    assert console.ask("file.read_bytes() != former")
    assert console.ask(COUNTS) == [[2, pid] for _, pid in first]
    rank = first[1][1]
    os.kill(int(Path(f"/proc/{rank}/status").read_text().partition("PPid:")[2].split()[0]), signal.SIGKILL)

    def healed() -> bool:
        try:
            console.ask("heal_mesh(counters, timeout=90)")
            return bool(console.ask(COUNTS)[1][1] != rank)
        except RuntimeError:  # the death was reported after the heal
            return False

    until(healed, "the agent that was started again is met by the new key", 90)


def grow_with_another_key(console: Console) -> None:
    """The same, and then a third host joins."""
    get_another_key(console)
    assert console.ask("procs.grow(hosts=1, timeout=90).sizes['hosts']", 90) == 3
    assert len(console.ask(COUNTS)) == 3
