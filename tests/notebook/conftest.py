"""One kernel for most tests of this folder, with a mesh `w` of four procs and an actor mesh `a` on it."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Notebook

ACTORS = """
import os, signal, socket, time
from monarch.actor import Actor, current_rank, endpoint, heal_mesh, this_host

class Worker(Actor):
    @endpoint
    def work(self, seconds=0.0, say="", gate=""):
        if say:
            print(say)
        until = time.monotonic() + seconds
        while time.monotonic() < until or (gate and not os.path.exists(gate)):
            time.sleep(0.02)  # an interrupt comes between two of these
        return current_rank().rank

    @endpoint
    def divide(self, x):
        return 1 / x

    @endpoint
    def die(self):
        print("going down")
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def nap(self, seconds):
        print("asleep", flush=True)
        time.sleep(seconds)

    @endpoint
    def receive(self):
        mine, other = socket.socketpair()
        print("waiting for a byte", flush=True)
        mine.recv(1)

    @endpoint
    def fail_late(self, x=0):
        time.sleep(0.2)
        return 1 / x
"""


@pytest.fixture(scope="session")
def kernel() -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_HEAL_MAX_RESTARTS", "1000")  # each test that kills a rank has it healed, at any pace
        notebook = Notebook()
    # A cell waits so long for lines written before its replies; on a busy machine they may need more than 1 s.
    notebook.run("from monarch_kernel.output import cell_output; cell_output.SILENCE_SECONDS = 10.0").ok()
    try:
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def nb(kernel: Notebook) -> Notebook:
    """The shared kernel; the mesh and its actors are whole, whatever the test before has done."""
    kernel.run(ACTORS).ok()
    kernel.run("%mesh w gpus=4").ok()
    kernel.run(
        "if 'a' not in globals() or a._state.stopped or a._state.procs is not w._state: a = w.spawn('a', Worker)"
    ).ok()
    kernel.run("heal_mesh(w); a.work.call().get()").ok()
    return kernel
