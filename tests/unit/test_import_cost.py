"""Importing the library is cheap and brings in nothing that a process may not want."""

import json
import subprocess
import sys

import pytest

NEVER = {"torch", "numpy", "IPython", "ipykernel", "ipywidgets", "anywidget"}

AT_FIRST_USE = {"asyncio", "ssl", "zmq"}
FEW = 100  # modules
FEW_OF_OURS = 80

LOADED = """
import json, sys
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded(module: str) -> set[str]:
    """All modules that the import of one brings into a fresh interpreter."""
    code = LOADED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50)
    return set(json.loads(done.stdout))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("name", ["monarch_nb", "monarch"])
def test_the_package_brings_in_little(name: str) -> None:
    modules = loaded(name)
    assert len(modules) < FEW
    assert not tops(modules) & {*NEVER, "zmq", "msgspec", "cloudpickle", "asyncio"}


def test_the_actor_api_brings_in_few_modules_and_no_sockets() -> None:
    modules = loaded("monarch_nb.actor")
    assert sum(name.startswith("monarch_nb") for name in modules) <= FEW_OF_OURS
    assert not tops(modules) & (NEVER | AT_FIRST_USE)


ON_ONE_HOST = """
import sys
from monarch.actor import this_host

(there,) = this_host().spawn_procs().run(lambda: list(sys.modules)).get().values()
print(*{*sys.modules, *there} & {"asyncio", "ssl", "zmq"}, "none besides")
"""


def test_a_program_on_one_host_starts_without_asyncio_and_zeromq() -> None:
    done = subprocess.run([sys.executable, "-c", ON_ONE_HOST], check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout == "none besides\n"
