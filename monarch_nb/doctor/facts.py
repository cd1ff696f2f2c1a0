"""Facts of a machine, collected without changes to it, in milliseconds."""

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from msgspec import Struct

from monarch_nb._package import __version__
from monarch_nb.host.folders import base_folder
from monarch_nb.host.gpus import devices
from monarch_nb.host.linux import has_pidfd, portable, rdma_devices
from monarch_nb.host.packages import installed

_REQUIRED = ("monarch-nb", "pyzmq", "msgspec", "cloudpickle")
_OPTIONAL = ("torch", "numpy", "torchmonarch", "nixl-cu12", "nixl-cu13")
_SHARED = Path("/dev/shm")


class Facts(Struct, frozen=True):
    """Facts of a machine. Limits are numbers of things, sizes are bytes; None stands for what is absent."""

    host: str
    python: str
    executable: str
    versions: dict[str, str]  # "" for a required distribution that is not installed
    files: tuple[int, int]  # open files that a process may have: the soft limit, and the hard limit
    processes: int
    memory_files: bool
    shared_memory: int | None
    run_folder: str
    run_folder_problem: str
    free_disk: int
    loopback_problem: str
    name_resolves: bool
    quick_start: bool  # processes are forked from one that has imported everything
    gpus: int
    rdma: tuple[str, ...] = ()  # RDMA devices that this process may use
    rdma_closed: tuple[str, ...] = ()  # RDMA devices that it may not use
    locked_memory: int = sys.maxsize  # bytes that a process may lock, for devices
    gpu_models: tuple[str, ...] = ()
    gpu_driver: str = ""  # its version
    torch_cuda: str = ""  # the CUDA version PyTorch is built for; "" for none, or without PyTorch
    gpu_packages: tuple[tuple[str, str], ...] = ()  # libraries for GPUs with versions, "" for absent ones


def facts_of_this_machine() -> Facts:
    """Collects the facts of this machine and process."""
    folder = base_folder()
    return Facts(
        host=platform.node(),
        python=platform.python_version(),
        executable=sys.executable,
        versions=_versions(),
        files=_limits(resource.RLIMIT_NOFILE),
        processes=_limits(resource.RLIMIT_NPROC)[0],
        memory_files=_memory_files(),
        shared_memory=_shared_memory(),
        run_folder=str(folder),
        run_folder_problem=_folder_problem(folder),
        free_disk=shutil.disk_usage(folder).free,
        loopback_problem=_loopback_problem(),
        name_resolves=_name_resolves(),
        quick_start=has_pidfd() and not portable(),
        gpus=len(devices()),
        rdma=rdma_devices(),
        rdma_closed=rdma_devices(closed=True),
        locked_memory=_limits(resource.RLIMIT_MEMLOCK)[0],
        gpu_models=_gpu_models(),
        gpu_driver=_gpu_driver(),
        torch_cuda=_torch_cuda(),
        gpu_packages=tuple((name, _any_of(packages)) for name, packages in _FOR_GPUS),
    )


def _versions() -> dict[str, str]:
    versions = {name: installed(name) for name in (*_REQUIRED, *_OPTIONAL)}
    versions["monarch-nb"] = versions["monarch-nb"] or __version__  # not installed, but on the path
    return {name: version for name, version in versions.items() if version or name in _REQUIRED}


def _limits(kind: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    return (
        sys.maxsize if soft == resource.RLIM_INFINITY else soft,
        sys.maxsize if hard == resource.RLIM_INFINITY else hard,
    )


def _memory_files() -> bool:
    try:
        os.close(os.memfd_create("monarch-doctor"))
    except (AttributeError, OSError):
        return False
    return True


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage(_SHARED).total
    except OSError:
        return None


def _folder_problem(folder: Path) -> str:
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix="mnb-doctor-") as probe,
            socket.socket(socket.AF_UNIX) as door,
        ):
            door.bind(os.path.join(probe, "socket"))
    except OSError as error:
        return str(error)
    return ""


def _loopback_problem() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as door:
            socket.create_connection(door.getsockname(), timeout=2).close()
    except OSError as error:
        return str(error)
    return ""


def _name_resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


# Libraries for GPUs, and the packages that contain them.
_FOR_GPUS = (
    ("NCCL", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    ("cuda-bindings", ("cuda-bindings",)),
    ("nvidia-ml-py", ("nvidia-ml-py",)),
)


def _any_of(packages: tuple[str, ...]) -> str:
    return next((version for package in packages if (version := installed(package))), "")


def _gpu_models() -> tuple[str, ...]:
    """Returns names of the GPUs as the driver shows them, without CUDA; none in containers that hide it."""
    texts = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            texts.append(file.read_text())
    return tuple(match[1].strip() for text in texts if (match := re.search(r"^Model:(.+)$", text, re.MULTILINE)))


def _gpu_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", text)
    return match[1] if match else ""


def _torch_cuda() -> str:
    """Returns the CUDA version of PyTorch from its version file, as importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    match = re.search(r"^cuda(?:: [^=]+)? = '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""
