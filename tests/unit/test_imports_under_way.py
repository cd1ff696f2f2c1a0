"""Code that uses a library if the program has imported it, while another thread is in the middle of that import."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from monarch_nb._package import imported
from monarch_nb.collectives.groups import ProcessGroups
from monarch_nb.compat.internals import is_ipython
from monarch_nb.debug.reproduce_rank import surroundings
from monarch_nb.diagnosis.memory_rank import memory_use
from monarch_nb.diagnosis.slow_rank import _is_distributed, _uses_gpu
from monarch_nb.gpu.choice import load
from monarch_nb.mesh.value import describe
from monarch_nb.rdma.memory import memory_of
from monarch_nb.runtime.tensor_memory import LivingTensors

pytestmark = pytest.mark.timeout(60)

NAMES = ("torch", "torch.cuda", "torch.distributed", "torch.distributed.distributed_c10d", "numpy", "IPython")


@pytest.fixture(autouse=True)
def _partial(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__spec__._initializing = True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def test_a_module_counts_as_imported_once_its_import_is_complete() -> None:
    assert [imported(name) for name in (*NAMES, "no_such_module")] == [None] * (len(NAMES) + 1)
    assert imported("sys") is sys
    del sys.modules["torch"].__spec__._initializing  # type: ignore[union-attr]
    assert imported("torch") is sys.modules["torch"]


def test_memory_of_a_buffer_is_found() -> None:
    memory = memory_of(bytearray(b"abc"), writable=True)
    memory.fix()
    assert memory.read() == b"abc"


def test_values_of_ranks_are_described() -> None:
    assert describe(2, [[1], [2]].__getitem__, str) == "\n  [0]: [1]\n  [1]: [2]"


def test_memory_devices_and_groups_of_this_process_are_read() -> None:
    assert LivingTensors().all == []
    assert memory_use().resident > 0
    assert load() is None
    assert surroundings().torch == ""
    groups = ProcessGroups()
    assert (groups.keys(), groups.remembered()[0]) == ({}, [])
    assert [_is_distributed(), _uses_gpu(), is_ipython()] == [False] * 3
