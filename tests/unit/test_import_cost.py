"""Importing the library is cheap and brings in nothing that a process may not want."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "monarch_nb"
NEVER = {"torch", "numpy", "IPython", "ipykernel", "ipywidgets", "anywidget"}

MEASURE = """
import json, sys, time
before = time.perf_counter()
import {module}
spent = time.perf_counter() - before
print(json.dumps([spent, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def measure(module: str) -> tuple[float, set[str]]:
    """Seconds for the import in a fresh interpreter, and the top names of all modules loaded by then."""
    code = MEASURE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50)
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


@pytest.mark.parametrize("name", ["monarch_nb", "monarch"])
def test_the_package_imports_in_a_moment_and_alone(name: str) -> None:
    runs = [measure(name) for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < 0.1  # the least disturbed of three
    assert not runs[0][1] & {*NEVER, "zmq", "msgspec", "cloudpickle", "asyncio"}


def test_the_actor_api_brings_in_neither_torch_nor_ipython() -> None:
    _, modules = measure("monarch_nb.actor")
    assert not modules & NEVER
