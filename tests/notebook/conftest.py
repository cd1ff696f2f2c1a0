"""One kernel for most tests of this folder, with a mesh `w` of four procs and an actor mesh `a` on it."""

import ast
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.processes import MARK, left_behind
from tests.effort import AS_LATER
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
    """The shared kernel; the mesh and its actors are healed after the test before."""
    kernel.run(ACTORS).ok()
    kernel.run("globals().pop('_', None)").ok()  # a test that assigns it ends IPython's own updates
    kernel.run("%mesh w gpus=4").ok()
    kernel.run(
        "if 'a' not in globals() or a._state.stopped or a._state.procs is not w._state: a = w.spawn('a', Worker)"
    ).ok()
    kernel.run("heal_mesh(w); a.work.call().get()").ok()
    return kernel


@pytest.fixture(scope="session")
def unloaded_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel without the extension, for pages and examples: each with its own would import torch again."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        patch.setenv(MARK, mark)
        notebook = Notebook(load=False, folder=tmp_path_factory.mktemp("pages"))
    try:
        yield notebook
    finally:
        notebook.close()
    assert left_behind(mark) == []


@pytest.fixture(scope="module")
def blank(unloaded_kernel: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """As `fresh`, for all tests of a module."""
    yield from _new(unloaded_kernel, tmp_path_factory.mktemp("blank"))


@pytest.fixture
def fresh(unloaded_kernel: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    """The kernel as in a new notebook: no names, no numbers, nothing loaded, no meshes, and its folder is empty."""
    yield from _new(unloaded_kernel, tmp_path)


@pytest.fixture
def loaded(fresh: Notebook) -> Notebook:
    """`fresh` with the extension: unlike those of `nb`, its processes are born with torch."""
    fresh.run("%load_ext monarch").ok()
    return fresh


# A reset collects garbage, and need not traverse torch each time: it stays loaded.
FREEZE = "import gc, sys\nif 'torch' in sys.modules and not gc.get_freeze_count(): gc.collect(); gc.freeze()"


def _new(kernel: Notebook, folder: Path) -> Iterator[Notebook]:
    kernel.aside(f"import os; os.chdir({str(folder)!r})")
    kernel.aside(FREEZE)
    environment = ast.literal_eval(kernel.run("dict(os.environ)").text)
    kernel.aside("get_ipython().reset(new_session=True)")
    yield kernel
    kernel.aside("%load_ext monarch")
    kernel.aside("%stop --all")
    kernel.aside("%unload_ext monarch")
    kernel.aside(f"import os; os.environ.clear(); os.environ.update({environment!r})")
