"""From nothing to the first reply of one process: the first thing a program, or a notebook, does with the library."""

import os
import sys
import time


def program() -> None:
    """As a script; runs on ours and on torchmonarch."""
    began = time.perf_counter()
    from monarch.actor import Actor, endpoint, this_host

    imported = time.perf_counter()

    class Worker(Actor):
        @endpoint
        def noop(self) -> None:
            return None

    this_host().spawn_procs(per_host={"gpus": 1}).spawn("workers", Worker).noop.call().get()
    done = time.perf_counter()
    print(done - began, done - imported, flush=True)


def notebook() -> None:
    """As cells; the shell exists before. Only on ours."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    began = time.perf_counter()
    for cell in (
        "%load_ext monarch",
        "%mesh workers gpus=1",
        "from monarch.actor import Actor, endpoint",
        "class Worker(Actor):\n    @endpoint\n    def noop(self): return None",
        "workers.spawn('noops', Worker).noop.call().get()",
    ):
        shell.run_cell(cell, silent=True).raise_error()
    seconds = time.perf_counter() - began
    print(seconds, seconds, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "notebook":
        notebook()
    else:
        program()
        if sys.argv[1] == "leave":  # some peers end slowly, or not at all
            os._exit(0)
