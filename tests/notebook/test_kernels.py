"""The notebook tests again, in the kernels of other front ends: what each supports works, the rest degrades.

`make test-slow` runs them; each kernel has an environment of its own, made by scripts/kernels.py and kept in build/.
"""

import os
import subprocess
import sys

import pytest

from scripts.kernels import KERNELS, PATH, ROOT, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(620)]
TESTS = (
    *("test_views", "test_guide", "test_magics", "test_output", "test_failures", "test_interrupts", "test_forgotten"),
    *("test_debug_prompt", "test_debug_magics", "test_debug_views", "test_debug_lifetime", "test_dap", "test_profile"),
)
PAGES = ("test_panel", "test_live_displays", "test_debugger_lab")


def again(name: str, modules: list[str]) -> None:
    """Runs these modules in the kernel of this name."""
    try:
        python = interpreter(name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SKIPPED {name}: its environment cannot be made: {error.stderr[-500:]}")
    env = {**os.environ, "MONARCH_TEST_KERNEL": str(python), "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *modules],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("name", KERNELS)
def test_the_notebook_works_in_the_kernel_of(name: str) -> None:
    again(name, [f"tests/notebook/{module}.py" for module in TESTS])


def test_a_program_of_marimo_spawns_calls_profiles_and_shows() -> None:
    try:
        python = interpreter("marimo")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SKIPPED marimo: its environment cannot be made: {error.stderr[-500:]}")
    program = ROOT / "tests" / "notebook" / "marimo_app.py"
    env = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run([str(python), str(program)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["[0, 1]", "[0, 10]", "text/html trainers", "text/html Profile of trainers"]


@pytest.mark.parametrize("name", ["ipykernel-7.3", "ipykernel-7.4"])
def test_the_page_works_with_the_kernel_of(name: str) -> None:
    again(name, [f"tests/browser/{module}.py" for module in PAGES])
