"""Memory files of a GPU: large buffers between processes that share the GPU, without a copy through the host.

Like memory files of the host they are written once, named by a descriptor, and live while any process holds
the descriptor, so that nothing is lost or left over when either side is killed. A receiver copies them.
"""

import contextlib
import ctypes
import os
import select
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from monarch_nb.gpu.choice import driver
from monarch_nb.gpu.driver import GpuError

SMALLEST = 1 << 20  # bytes; smaller buffers are as fast through the host
_SYS_PIDFD_GETFD = 438  # the same on all architectures
_PR_SET_PTRACER, _ANY = 0x59616D61, 2**64 - 1  # <sys/prctl.h>
_FOLDER = "gpus"


class DeviceFile:
    """Bytes in the memory of a GPU, named by a descriptor, which is closed with the last reference to this object."""

    __slots__ = ("_closer", "_staged", "device", "fd", "is_received", "length", "size")

    def __init__(self, fd: int, length: int, size: int, device: int, *, is_received: bool) -> None:
        self._closer = select.epoll.fromfd(fd)  # in C, since Ctrl-C can end a Python finalizer before its first line
        self._staged: bytearray | None = None
        self.fd, self.length, self.size, self.device = fd, length, size, device
        self.is_received = is_received

    @classmethod
    def holding(cls, address: int, length: int, device: int) -> "DeviceFile | None":
        """Copies memory of the device, after the present work of the current stream; None if the device has no room."""
        gpu = driver()
        assert gpu is not None
        try:
            fd, size = gpu.create(length, device)
        except GpuError as error:
            if error.sticky:
                raise
            return None
        file = cls(fd, length, size, device, is_received=False)
        own = gpu.map(fd, size, device)
        try:
            gpu.copy(own, address, length, device=device, after=gpu.current_stream(device))
        finally:
            gpu.unmap(own, size)
        return file

    @classmethod
    def of_process(cls, pid: int, fd: int, length: int, size: int, device: int) -> "DeviceFile":
        """Returns the file that process `pid` has as `fd`. Raises OSError."""
        return cls(_fetched(pid, fd), length, size, device, is_received=True)

    @property
    def nbytes(self) -> int:
        """As `length`, under the name that other buffers use."""
        return self.length

    def copy_to(self, address: int, device: int) -> None:
        """Copies the content to memory of a device, after the work of its current stream. Blocks; raises GpuError."""
        gpu = driver()
        assert gpu is not None
        own = gpu.map(self.fd, self.size, self.device)
        try:
            gpu.copy(address, own, self.length, device=device, after=gpu.current_stream(device))
        finally:
            gpu.unmap(own, self.size)

    def view(self) -> memoryview:
        """Returns the content in memory of the host, for processes that do not share the GPU; copied once."""
        if self._staged is None:
            room = bytearray(self.length)
            gpu = driver()
            assert gpu is not None
            own = gpu.map(self.fd, self.size, self.device)
            try:
                target = ctypes.addressof(ctypes.c_char.from_buffer(room))
                gpu.copy(target, own, self.length, device=self.device)
            finally:
                gpu.unmap(own, self.size)
            self._staged = room
        return memoryview(self._staged)

    def read_into(self, target: memoryview) -> None:
        """Copies the content into memory of the host of the same length."""
        target[:] = self.view()

    def private(self) -> Any:
        """Returns the memory to decode a message from: the file itself where it arrived, else bytes."""
        return self if self.is_received else memoryview(bytearray(self.view()))


class Marker(ctypes.Array[ctypes.c_ubyte]):
    """Stands for a device file in a pickle, in which buffers have memory of the host."""

    _type_ = ctypes.c_ubyte
    _length_ = 1
    file: DeviceFile


def announce(folder: Path, name: str) -> bool:
    """Announces the GPUs of this process to others of this host; False without GPUs that can receive files."""
    text = _own_gpus()
    if not text:
        return False
    try:
        (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
        (folder / _FOLDER / name).write_text(text)
    except OSError:  # a full disk: transfers then go through the host
        return False
    return True


def announced(folder: Path, name: str) -> bool:
    """Returns whether a process of this host has announced the same GPUs as this process sees, in the same order."""
    text = _own_gpus()
    with contextlib.suppress(OSError):
        return bool(text) and (folder / _FOLDER / name).read_text() == text
    return False


@cache
def _own_gpus() -> str:
    """Returns the GPUs that this process sees, "" without one or if it cannot receive files. Initialises nothing."""
    if os.environ.get("MONARCH_NB_GPU") != "pretence" and (
        not os.path.exists("/dev/nvidiactl") or find_spec("cuda") is None or find_spec("cuda.bindings") is None
    ):
        return ""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)  # else yama may forbid others to fetch descriptors
    read_end, write_end = os.pipe()
    try:
        os.close(_fetched(os.getpid(), read_end))
    except OSError:  # a sandbox without the call
        return ""
    finally:
        os.close(read_end)
        os.close(write_end)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def _fetched(pid: int, fd: int) -> int:
    """Duplicates a descriptor of another process into this one: the driver's have no path that could be opened."""
    pidfd = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        os.set_inheritable(copy, False)
        return int(copy)
    finally:
        os.close(pidfd)
