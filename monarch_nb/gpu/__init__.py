"""GPUs, behind one small interface: memory that other processes can open, copies, and errors that stay."""

from monarch_nb.gpu.driver import Driver, GpuError, GpuMemoryError, driver, use

__all__ = ["Driver", "GpuError", "GpuMemoryError", "driver", "use"]
