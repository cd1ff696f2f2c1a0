"""GPUs, behind one small interface: memory that other processes can open, copies, and errors that stay."""

from monarch_nb.gpu.driver import Driver, GpuError, GpuMemoryError, driver, use
from monarch_nb.gpu.files import SMALLEST, DeviceFile, Marker, announce, announced

__all__ = [
    "SMALLEST",
    "DeviceFile",
    "Driver",
    "GpuError",
    "GpuMemoryError",
    "Marker",
    "announce",
    "announced",
    "driver",
    "use",
]
