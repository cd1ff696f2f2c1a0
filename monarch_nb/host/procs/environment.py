"""The environment of a process: its effect on how the process is started, and how it is set."""

import os
from collections.abc import Mapping

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")

# Threads of OpenBLAS spin for two to that power of processor cycles before they sleep; by default, for a tenth of a
# second of processor time for each thread of each proc when a fork gets its threads, and after each of their tasks.
_SPIN, _BRIEFLY = "OPENBLAS_THREAD_TIMEOUT", "20"
# PyTorch's profiler writes two lines on each begin and end otherwise, which would be in the cell; read at its import.
QUIET = {"KINETO_LOG_LEVEL": "6"}
HELD_BACK = (*POOLS, _SPIN, *QUIET)

PRELOAD = "MONARCH_NB_PRELOAD"  # modules that templates import, separated by commas

# Read once, when a library or the interpreter is loaded: a fork of a process that has loaded it would not see them.
_READ_AT_LOAD = ("LD_", "DYLD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "TORCH_", "PYTHON", "CUDA_",
                 "CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "MALLOC_", "GLIBC_", "LC_", "LANG", "ATEN_", "NUMPY_",
                 "NPY_", "TRITON_", "DNNL_", "ONEDNN_")  # fmt: skip
# Read late (NCCL_* too: at init_process_group), or corrected in the fork. Importing scikit-learn sets those of KMP
# for whichever OpenMP is loaded after.
_FINE = {"CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS",
         "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
         "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # fmt: skip


def overlaid(base: Mapping[str, str], overlay: Mapping[str, str | None]) -> dict[str, str]:
    """Returns `base` with `overlay` laid over it; None removes a name."""
    result = {**base, **{name: value for name, value in overlay.items() if value is not None}}
    for name, value in overlay.items():
        if value is None:
            result.pop(name, None)
    return result


def read_at_load(name: str) -> bool:
    """Returns whether a variable counts only when libraries load, and cannot be corrected in a fork."""
    return name not in _FINE and name.startswith(_READ_AT_LOAD)


def reason_for_cold_start(overlay: Mapping[str, str | None], base: Mapping[str, str]) -> str:
    """Returns why a process with this environment cannot be a fork of a template that has `base`; empty if it can.

    Only names whose value differs from the template's count.
    """
    for name, value in sorted(overlay.items()):
        if value != base.get(name) and read_at_load(name):
            return f"{name} is read when libraries load"
    return ""


def held_back(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a template: `base` with every thread pool held back to the calling thread."""
    return {_SPIN: _BRIEFLY, **QUIET, **base, **dict.fromkeys(POOLS, "1")}


def install(environment: Mapping[str, str]) -> None:
    """Makes `environment` this process's own, in C as well."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def wanted_threads(environment: Mapping[str, str], *names: str) -> int:
    """Returns the size of a thread pool: the first of `names` that is set, else the usable processors."""
    for name in names:
        value = environment.get(name, "").split(",")[0]
        if value.isdigit() and int(value) > 0:
            return int(value)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
