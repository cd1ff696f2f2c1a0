"""The functions of a GPU's driver that Monarch-NB needs, and the load of a GPU by NVIDIA's management library (NVML),
through the optional package nvidia-ml-py of NVIDIA.

Source: the NVML API reference, sections "Device Queries" and "Clocks event reasons"; docs.nvidia.com/deploy/nvml-api.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

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


class GpuError(RuntimeError):
    """A failed call of the driver. `code` is its number; `sticky` if every later call of this process will fail too."""

    def __init__(self, text: str, code: int = 0, *, sticky: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.sticky = sticky


class GpuMemoryError(GpuError):
    """The device has no room for an allocation."""


class GpuDriver(Protocol):
    """Memory of the GPUs that this process sees. Addresses are numbers in one space with those of host memory.

    Methods may be called from any thread; each raises GpuError where the driver refuses. Devices are numbered as
    `torch.cuda` numbers them in this process.
    """

    name: str  # "cuda", or "pretence"

    # -- torch's side -------------------------------------------------------------------------------------------------

    def device_of_tensor(self, tensor: "torch.Tensor | torch.UntypedStorage") -> int | None:
        """Returns the device of a torch tensor or storage; None for one elsewhere. Makes no call of the driver."""

    def new_storage(self, size: int, device: int) -> "torch.UntypedStorage":
        """Returns memory of torch's allocator as a `torch.UntypedStorage` of `size` bytes.

        Raises torch.OutOfMemoryError.
        """

    def current_stream(self, device: int) -> int:
        """Returns torch's current stream of the calling thread, as `copy` takes it."""

    def devices(self) -> tuple[int, ...]:
        """Returns the devices if this process computes on them already, else none. Initialises nothing."""

    # -- addresses ----------------------------------------------------------------------------------------------------

    def device_of(self, address: int) -> int | None:
        """Returns the device whose memory contains an address; None for memory of the host."""

    def range_of(self, address: int) -> tuple[int, int]:
        """Returns start and size of the allocation that contains an address."""

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, size: int, *, device: int, after: int = 0) -> None:
        """Copies bytes between any two addresses; blocks until the copy is complete.

        `after` is a stream of `device` (0: none) whose present work comes first. Memory of the host that is not pinned
        is staged through pinned memory, a piece at a time.
        """

    # -- memory that others lend (torch's allocations): named by a handle, opened by other processes ------------------

    def lend(self, address: int) -> bytes:
        """Returns a handle by which other processes of this host open the allocation that starts at `address`."""

    def open(self, handle: bytes, device: int) -> int:
        """Opens an allocation that another process lends; returns its address here. Each `open` needs a `close`."""

    def close(self, address: int) -> None:
        """Ends an `open`."""

    # -- memory of our own: a descriptor names it; it lives as long as a process holds the descriptor or maps it ------

    def create(self, size: int, device: int) -> tuple[int, int]:
        """Allocates at least `size` bytes; returns a descriptor (close it with os.close) and the actual size in bytes.

        Raises GpuMemoryError where the device is full.
        """

    def map(self, descriptor: int, size: int, device: int) -> int:
        """Maps the memory behind a descriptor, of the `size` that `create` returned; returns its address."""

    def unmap(self, address: int, size: int) -> None:
        """Ends a `map`. Work on the memory must have ended."""

    # -- state --------------------------------------------------------------------------------------------------------

    def identity(self, device: int) -> str:
        """Returns a name of the device that no other device of this machine has, such as its UUID."""

    def memory(self, device: int) -> tuple[int, int]:
        """Returns free and total bytes."""

    def load(self, device: int) -> GpuLoad:
        """Returns the load of the device and its memory in use. May take milliseconds."""

    def check(self) -> None:
        """Raises the sticky GpuError of this process, if a kernel or copy has caused one; else does nothing."""


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
