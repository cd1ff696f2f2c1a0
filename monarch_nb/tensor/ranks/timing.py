"""Times of parts of a program in the process that runs them, such as a rank: `monarch.timer`."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

logger = logging.getLogger(__name__)
_DEFAULT = "default"


class ExecutionTimer:
    """Measures named parts, in milliseconds: on a GPU the time of its current stream, else the elapsed time.

    `with ExecutionTimer.time("matmul"):`, or `start` and `stop`. Parts of one name may be nested. All measurements are
    of this process, which has one record.
    """

    _lock = threading.Lock()
    _measured: ClassVar[defaultdict[str, list[float]]] = defaultdict(list)
    _begun: ClassVar[defaultdict[tuple[str, bool], list[Any]]] = defaultdict(list)  # by name, and whether on a GPU
    _pending: ClassVar[defaultdict[str, list[tuple[Any, Any]]]] = defaultdict(list)  # parts that a GPU may still run

    @classmethod
    @contextmanager
    def time(cls, name: str | None = None, use_cpu: bool = False) -> Iterator[None]:
        """Measures a `with` block; with `use_cpu` the elapsed time, even if there is a GPU."""
        cls.start(name, use_cpu)
        try:
            yield
        finally:
            cls.stop(name, use_cpu)

    @classmethod
    def start(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Begins a part."""
        on_gpu = torch.cuda.is_available() and not use_cpu
        with cls._lock:
            cls._begun[name or _DEFAULT, on_gpu].append(_mark() if on_gpu else time.perf_counter())

    @classmethod
    def stop(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Ends the part of this name that began last. Raises ValueError if there is none. Does not wait for a GPU."""
        now, name = time.perf_counter(), name or _DEFAULT
        on_gpu = torch.cuda.is_available() and not use_cpu
        with cls._lock:
            begun = cls._begun[name, on_gpu]
            if not begun:
                raise ValueError(
                    f"ExecutionTimer: no part {name!r} has begun: ExecutionTimer.start({name!r}) comes first"
                )
            if on_gpu:
                cls._pending[name].append((begun.pop(), _mark()))
            else:
                cls._measured[name].append((now - begun.pop()) * 1000)

    @classmethod
    def reset(cls) -> None:
        """Forgets everything."""
        with cls._lock:
            for record in (cls._measured, cls._begun, cls._pending):
                record.clear()

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """Returns the number of measurements by name, and their mean, total, least and most; waits for the GPU."""
        with cls._lock:
            cls._settle()
            return {
                name: {
                    "count": len(times),
                    "mean_ms": sum(times) / len(times),
                    "total_ms": sum(times),
                    "min_ms": min(times),
                    "max_ms": max(times),
                }
                for name, times in cls._measured.items()
                if times
            }

    @classmethod
    def get_latest_measurement(cls, name: str | None = None) -> float:
        """Returns the last measurement of a name; 0 without any, which is logged. Waits for the GPU."""
        with cls._lock:
            cls._settle()
            times = cls._measured.get(name or _DEFAULT)
        if not times:
            logger.warning("ExecutionTimer: no part %r has been measured", name or _DEFAULT)
            return 0.0
        return times[-1]

    @classmethod
    def _settle(cls) -> None:
        for name, marks in cls._pending.items():
            for first, last in marks:
                last.synchronize()
                cls._measured[name].append(first.elapsed_time(last))
        cls._pending.clear()


def _mark() -> Any:
    """Records an event in the device's current stream, with its time."""
    event: Any = torch.cuda.Event  # without types
    mark = event(enable_timing=True)
    mark.record()
    return mark


def execution_timer_start(name: str | None = None, use_cpu: bool = False) -> None:
    """`ExecutionTimer.start` as a function, for `monarch.remote`."""
    ExecutionTimer.start(name, use_cpu)


def execution_timer_stop(name: str | None = None, use_cpu: bool = False) -> None:
    """`ExecutionTimer.stop` as a function, for `monarch.remote`."""
    ExecutionTimer.stop(name, use_cpu)


def get_execution_timer_average_ms(name: str = _DEFAULT) -> torch.Tensor:
    """Returns the mean of a name's measurements as a tensor. Raises KeyError if there are none."""
    return torch.tensor(ExecutionTimer.summary()[name]["mean_ms"], dtype=torch.float64)


def get_latest_timer_measurement(name: str | None = None) -> torch.Tensor:
    """Returns the last measurement of a name as a tensor."""
    return torch.tensor(ExecutionTimer.get_latest_measurement(name), dtype=torch.float64)


def get_execution_timer_summary() -> dict[str, dict[str, float]]:
    """`ExecutionTimer.summary` as a function."""
    return ExecutionTimer.summary()


def get_time_perfcounter() -> torch.Tensor:
    """Returns the clock of the process, in seconds, as a tensor."""
    return torch.tensor(time.perf_counter(), dtype=torch.float64)


__all__ = [
    "ExecutionTimer",
    "execution_timer_start",
    "execution_timer_stop",
    "get_execution_timer_average_ms",
    "get_latest_timer_measurement",
]
