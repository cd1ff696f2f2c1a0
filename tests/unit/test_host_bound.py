"""Programs of others that end with the process that has started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb.host.bound import end_bound, start_bound
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(60)]
OWNER = """
import os, signal, sys, time
from monarch_nb.host.bound import start_bound
bound = start_bound([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
child = os.fork()  # as multiprocessing would; it lives on
if child:
    print(bound.stdout.readline().strip(), child, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["", "1"], ids=["linux", "portable"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param:
        monkeypatch.setenv("MONARCH_NB_PORTABLE", request.param)
    return str(request.param)


def test_a_bound_program_ends_with_its_killed_owner(system: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        program, child = map(int, owner.stdout.readline().split())
        try:
            assert alive(program)
            owner.kill()
            owner.wait()
            until(lambda: not alive(program), "it has ended")
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_output_and_status_of_a_bound_process_are_known(system: str) -> None:
    program = start_bound([sys.executable, "-c", "import sys; print(sys.stdin.read() + 'x'); sys.exit(3)"])
    assert program.stdout is not None
    assert program.stdout.read() == "x\n"
    assert program.wait(20) == 3
    end_bound(program)
    program = start_bound([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    end_bound(program)
    until(lambda: not alive(pid), "it has ended")


def test_one_that_is_not_there_says_so() -> None:
    program = start_bound(["no-such-program"], errors=subprocess.STDOUT)
    assert program.stdout is not None
    assert program.stdout.read() == "no-such-program: not found\n"
    assert end_bound(program) == 127


def test_a_fork_may_use_the_number_of_the_pipe(tmp_path: Path) -> None:
    program = start_bound([sys.executable, "-c", "input()"])
    assert program.stdin is not None
    number = program.stdin.fileno()
    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT), number)
        program.stdin = None
        os.write(number, b"whole")
        os._exit(0)
    os.waitpid(child, 0)
    end_bound(program)
    assert (tmp_path / "own").read_text() == "whole"
