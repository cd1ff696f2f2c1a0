"""GPUs behind one small interface: memory that other processes can open, copies, and sticky errors."""

from monarch_nb.gpu.choice import driver, load, use
from monarch_nb.gpu.driver import GpuDriver, GpuError, GpuMemoryError
from monarch_nb.gpu.files import SMALLEST, DeviceFile, Marker, announce, announced
from monarch_nb.gpu.nvml import GpuLoad

__all__ = [
    "SMALLEST",
    "DeviceFile",
    "GpuDriver",
    "GpuError",
    "GpuLoad",
    "GpuMemoryError",
    "Marker",
    "announce",
    "announced",
    "driver",
    "load",
    "use",
]
