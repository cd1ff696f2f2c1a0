"""The load of a GPU by NVIDIA's management library (NVML), through the optional package nvidia-ml-py of NVIDIA.

Source: the NVML API reference, sections "Device Queries" and "Clocks event reasons"; docs.nvidia.com/deploy/nvml-api.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, TypeVar

T = TypeVar("T")
# Reasons for a lower clock, without those that are no fault (nvmlClocksEventReasons in nvml.h).
_SLOWDOWNS = {
    0x40: "it is too hot",
    0x20: "it is too hot",
    0x80: "its power supply limits it",
    0x8: "its hardware slows it down",
}


class GpuLoad(NamedTuple):
    """The load of a GPU, and its memory in use, in bytes.

    `share` is the share of the last moments in which kernels of any process ran, -1 if unknown. `own` is the memory of
    this process, with its context and its libraries; -1 if unknown, as in most containers.
    `slowed` is the reason for a reduced clock: "it is too hot (91 °C)".
    """

    share: float
    own: int
    used: int  # by all processes
    total: int
    slowed: str = ""


def load_by_nvml(uuid: str, used: int, total: int) -> GpuLoad:
    """Returns the load of the GPU with this UUID, without "GPU-"; the caller knows `used` and `total`."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no package, no driver, or a part of a GPU
        return GpuLoad(-1.0, -1, used, total)
    share = _asked(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100, -1.0)
    return GpuLoad(
        share, _asked(lambda: _own(nvml, handle), -1), used, total, _asked(lambda: _slowed(nvml, handle), "")
    )


def _asked(ask: Callable[[], T], unknown: T) -> T:
    try:
        return ask()
    except Exception:  # NVMLError: unsupported by this device or this driver
        return unknown


def _own(nvml: ModuleType, handle: object) -> int:
    """Returns bytes of this process; clients of MPS are listed separately. Processes have the numbers of the host."""

    def sizes(kind: str) -> list[int]:
        listed = [process for process in getattr(nvml, kind)(handle) if process.pid == os.getpid()]
        return [int(process.usedGpuMemory) for process in listed if process.usedGpuMemory is not None]

    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
    return max((size for kind in kinds for size in _asked(partial(sizes, kind), list[int]())), default=-1)


def _slowed(nvml: ModuleType, handle: object) -> str:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    reason = next((text for bit, text in _SLOWDOWNS.items() if reasons & bit), "")
    return reason and f"{reason} ({nvml.nvmlDeviceGetTemperature(handle, 0)} °C)"
