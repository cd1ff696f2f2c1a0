"""What this process uses: processor, memory, and the GPU it computes on."""

import contextlib
import os
import sys
import time

from monarch_nb.store.verbs import Used


class Meter:
    """Measures it: the share of the processor since the last time, memory and that of the GPU in bytes."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # when, and the processor time spent until then

    def read(self) -> Used:
        """What is used now."""
        now, spent = time.monotonic(), time.process_time()
        last, self._last = self._last, (now, spent)
        cpu = (spent - last[1]) / (now - last[0]) if last is not None else 0.0
        return Used(round(cpu, 2), _resident(), *_gpu())


def _resident() -> int:
    """Bytes of memory in use, in whole megabytes: less is of no interest."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 << 20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _gpu() -> tuple[float, int, int]:
    """Share in use, bytes in use and bytes there are, of the device this process computes on, if it does."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return -1.0, 0, 0
        free, total = cuda.mem_get_info()
    except Exception:  # a device that has failed must not end the statistics
        return -1.0, 0, 0
    try:
        share = cuda.utilization() / 100
    except Exception:  # needs NVIDIA's own Python package
        share = -1.0
    return share, total - free, total
