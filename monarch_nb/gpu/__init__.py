"""GPUs, behind one small interface: memory that other processes can open, copies, and errors that stay."""

from monarch_nb.gpu.choice import driver, use
from monarch_nb.gpu.driver import GpuDriver, GpuError, GpuMemoryError
from monarch_nb.gpu.files import SMALLEST, DeviceFile, Marker, announce, announced

__all__ = [
    "SMALLEST",
    "DeviceFile",
    "GpuDriver",
    "GpuError",
    "GpuMemoryError",
    "Marker",
    "announce",
    "announced",
    "driver",
    "use",
]
