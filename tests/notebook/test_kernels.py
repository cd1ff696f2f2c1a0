"""The notebook tests again, in the kernels of other front ends: what each can do works there, what it cannot degrades.

`make test-slow` runs them; each kernel has an environment of its own, made by scripts/kernels.py and kept in build/.
"""

import os
import subprocess
import sys

import pytest

from scripts.kernels import KERNELS, ROOT, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(620)]
TESTS = (
    *("test_faces", "test_magics", "test_output", "test_failures"),
    *("test_debug_prompt", "test_debug_magics", "test_debug_faces", "test_debug_lifetime"),
)


@pytest.mark.parametrize("name", KERNELS)
def test_the_notebook_works_in_the_kernel_of(name: str) -> None:
    try:
        python = interpreter(name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SKIPPED {name}: its environment cannot be made: {error.stderr[-500:]}")
    env = {
        **os.environ,
        "MONARCH_TEST_KERNEL": str(python),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernel_ext"))),
    }
    modules = [f"tests/notebook/{module}.py" for module in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
