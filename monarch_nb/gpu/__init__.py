"""GPUs behind one small interface: memory that other processes can open, copies, and sticky errors."""

from monarch_nb.gpu.choice import driver, load, use
from monarch_nb.gpu.driver import GpuDriver, GpuError, GpuLoad, GpuMemoryError
from monarch_nb.gpu.files import SMALLEST, DeviceFile, Marker, announce, announced

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
