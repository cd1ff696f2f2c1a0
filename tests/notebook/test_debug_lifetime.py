"""Kernels that end while ranks are stopped: no process stays, and the next kernel is usable."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.notebook.debug_tools import STOPPING, Debugged

pytestmark = pytest.mark.timeout(120)
SECONDS = 20


@pytest.fixture
def nb() -> Iterator[Debugged]:
    notebook = Debugged()
    try:
        yield notebook
    finally:
        notebook.close()


def stop_two(nb: Debugged) -> list[psutil.Process]:
    """Two ranks stop; their processes."""
    nb.run(STOPPING).ok()
    nb.run("%mesh w gpus=2\nt = w.spawn('trainers', Trainer)\nf = t.step.call(1)").ok()
    pids = nb.run("' '.join(str(one.pid) for one in monarch.debug.wait(2))").ok().text
    return [psutil.Process(int(pid)) for pid in pids.strip("'").split()]


@pytest.mark.slow
def test_a_kernel_that_is_restarted_while_ranks_are_stopped_begins_anew(nb: Debugged) -> None:
    workers = stop_two(nb)
    nb.manager.restart_kernel(now=True)
    nb.client.wait_for_ready(timeout=30)
    assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []
    nb.run("%load_ext monarch").ok()
    assert nb.run("%mdb").ok().text == "nothing is stopped"
    again = stop_two(nb)
    assert len(again) == 2
    nb.run("monarch.debug.resume()").ok()
    assert "all 2" in nb.run("f.get() and 'all 2'").ok().text


def test_a_kernel_that_is_killed_while_it_asks_leaves_no_process(nb: Debugged) -> None:
    workers = stop_two(nb)
    nb.client.execute("f.get()", allow_stdin=True)
    assert nb.client.get_stdin_msg(timeout=SECONDS)["content"]["prompt"] == "mdb trainers[gpus=0-1]> "
    os.kill(nb.pid, signal.SIGKILL)
    assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []


@pytest.mark.slow
def test_shutdown_while_ranks_are_stopped_leaves_no_process(nb: Debugged) -> None:
    workers = stop_two(nb)
    nb.close()
    assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []
