"""An error in a backward pass on sharded tensors reaches the program, wherever in PyTorch's engine it is raised.

In a process of its own, which must not abort.
"""

import subprocess
import sys

import pytest

from tests.cluster.backward_programs import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # PyTorch is imported in four processes of their own

RAISED = {
    "nested": ("ValueError", "inner"),
    "refused in a hook": ("DataDependentShapeError", "<lambda>"),
    "refused in a node": ("PropagationError", "refused"),
    "error of C": ("ValueError", "<lambda>"),
    "exit": ("SystemExit", "<lambda>"),
    "interrupt": ("KeyboardInterrupt", "interrupt"),
}


@pytest.fixture(scope="module")
def output() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.backward_programs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode} after:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_gets_its_own_error_and_later_passes_are_right(output: list[str], name: str) -> None:
    lines = dict(line.split("\t", 1) for line in output if "\t" in line)
    kind, function = RAISED.get(name, ("Mine", "fail"))
    assert lines[name] == f"{kind}\t{function}\tgoes on"


def test_errors_that_the_program_has_let_go_of_are_not_kept(output: list[str]) -> None:
    assert "frames that are kept: 0" in output
