"""The driver of this process for its GPUs, and the load of the first GPU."""

import os
from collections.abc import Callable

from monarch_nb._package import imported
from monarch_nb.gpu.driver import GpuDriver, GpuLoad, load_by_nvml
from monarch_nb.gpu.pretence import PretenceDriver

_chosen: list[GpuDriver | None] = []


def driver() -> GpuDriver | None:
    """Returns the driver of this process; None without a GPU or without bindings of its driver.

    Never initialises CUDA: the first call of a method does. MONARCH_NB_GPU=pretence chooses the driver of
    pretence, which keeps the memory of its devices in memory files; MONARCH_NB_GPU=none chooses none.
    """
    if not _chosen:
        _chosen.append(_find(os.environ.get("MONARCH_NB_GPU", "")))
    return _chosen[0]


def use(replacement: GpuDriver | None) -> Callable[[], None]:
    """Makes `replacement` the driver of this process, for tests; the result undoes that."""
    before = list(_chosen)
    _chosen[:] = [replacement]

    def undo() -> None:
        _chosen[:] = before

    return undo


def _find(name: str) -> GpuDriver | None:
    if name == "none":
        return None
    if name == "pretence":
        return PretenceDriver()
    if not os.path.exists("/dev/nvidiactl"):
        return None
    try:
        from monarch_nb.gpu.cuda import CudaDriver

        return CudaDriver()
    except (ImportError, RuntimeError, OSError):  # cuda-bindings raises RuntimeError where libcuda is not found
        return None


def load() -> GpuLoad | None:
    """Returns the load of this process's first GPU once the process uses it; None without one, or if it has failed.

    Initialises nothing. Without a driver of ours, PyTorch is asked. May take milliseconds.
    """
    gpu, cuda = driver(), getattr(imported("torch"), "cuda", None)
    try:
        if gpu is not None:
            devices = gpu.devices()
            return gpu.load(devices[0]) if devices else None
        if cuda is None or not cuda.is_initialized():
            return None
        free, total = cuda.mem_get_info(0)
        return load_by_nvml(str(cuda.get_device_properties(0).uuid), total - free, total)
    except Exception:  # a device that has failed must not end statistics
        return None
