"""The load and the memory of a GPU: by NVML, by PyTorch, and from the driver of pretence."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from monarch_nb.gpu import GpuLoad, load, use
from monarch_nb.gpu.driver import load_by_nvml
from monarch_nb.gpu.pretence import PretenceDriver
from monarch_nb.store import activity

GB = 1 << 30


class Nvml(SimpleNamespace):
    """The used part of NVIDIA's package; each function is an attribute that a test replaces."""

    def __init__(self) -> None:
        def listing(*processes: tuple[int, int | None]) -> object:
            return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]

        super().__init__(
            listing=listing,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=71),
            nvmlDeviceGetComputeRunningProcesses=listing((1, 5 * GB), (os.getpid(), 2 * GB)),
            nvmlDeviceGetMPSComputeRunningProcesses=listing(),
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1,
            nvmlDeviceGetTemperature=lambda handle, sensor: 91,
        )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    package = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", package)
    return package


@pytest.fixture
def pretence() -> Iterator[PretenceDriver]:
    gpu = PretenceDriver(capacity=8 * GB)
    undo = use(gpu)
    yield gpu
    undo()


def _refuses(*_: object) -> None:
    raise RuntimeError("NVMLError_NotSupported")


def test_nvml_says_the_share_and_the_memory_of_this_process(nvml: Nvml) -> None:
    assert load_by_nvml("1-2", 7 * GB, 80 * GB) == GpuLoad(0.71, 2 * GB, 7 * GB, 80 * GB)


def test_a_client_of_mps_is_found_and_a_slow_clock_named(nvml: Nvml) -> None:
    nvml.nvmlDeviceGetComputeRunningProcesses = nvml.listing((1, 5 * GB))
    nvml.nvmlDeviceGetMPSComputeRunningProcesses = nvml.listing((os.getpid(), GB))
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x1 | 0x40
    assert load_by_nvml("1-2", 7 * GB, 80 * GB) == GpuLoad(0.71, GB, 7 * GB, 80 * GB, "it is too hot (91 °C)")


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ("nvmlDeviceGetUtilizationRates", GpuLoad(-1.0, 2 * GB, 7 * GB, 80 * GB)),
        ("nvmlDeviceGetComputeRunningProcesses", GpuLoad(0.71, -1, 7 * GB, 80 * GB)),
        ("nvmlDeviceGetMPSComputeRunningProcesses", GpuLoad(0.71, 2 * GB, 7 * GB, 80 * GB)),
        ("nvmlDeviceGetHandleByUUID", GpuLoad(-1.0, -1, 7 * GB, 80 * GB)),
        ("nvmlInit", GpuLoad(-1.0, -1, 7 * GB, 80 * GB)),
    ],
)
def test_what_nvml_refuses_is_unknown(nvml: Nvml, refused: str, expected: GpuLoad) -> None:
    setattr(nvml, refused, _refuses)
    assert load_by_nvml("1-2", 7 * GB, 80 * GB) == expected


def test_in_a_container_processes_have_other_numbers(nvml: Nvml) -> None:
    nvml.nvmlDeviceGetComputeRunningProcesses = nvml.listing((1, 5 * GB), (os.getpid(), None))
    assert load_by_nvml("1-2", 7 * GB, 80 * GB).own == -1


def test_without_a_driver_pytorch_is_asked_once_it_computes(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    undo = use(None)
    cuda = SimpleNamespace(
        is_initialized=lambda: False,
        mem_get_info=lambda device: (73 * GB, 80 * GB),
        get_device_properties=lambda device: SimpleNamespace(uuid="1-2"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert load() is None
    cuda.is_initialized = lambda: True
    assert load() == GpuLoad(0.71, 2 * GB, 7 * GB, 80 * GB)
    cuda.mem_get_info = _refuses
    assert load() is None
    undo()


def test_a_ranks_memory_is_its_own_and_else_that_of_all(
    pretence: PretenceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    assert activity._gpu() == (-1.0, 0, 0)
    storage = pretence.new_storage(3 << 20, 0)
    pretence.share, pretence.others = 0.5, GB
    assert activity._gpu() == (0.5, 4 << 20, 8 * GB)
    unknown = GpuLoad(0.5, -1, 5 * GB, 8 * GB)
    monkeypatch.setattr(pretence, "load", lambda device: unknown)
    assert activity._gpu() == (0.5, 5 * GB, 8 * GB)
    monkeypatch.undo()
    pretence.break_down()
    assert activity._gpu() == (-1.0, 0, 0)
    del storage
