"""The few Linux calls that Python lacks; every one reports whether it worked, so that other systems take other ways."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
F_SETSIG = 10
IN_NONBLOCK = 0o4000
IN_CLOEXEC = 0o2000000
IN_MODIFY = 2
OOM_SCORE_ADJ_MAX = 1000
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
KEPT_FREE, OWN_MAPPING = 512 << 20, 32 << 20  # the second is the largest that glibc takes


def portable() -> bool:
    """Returns whether only POSIX calls are used: off Linux, or with `MONARCH_NB_PORTABLE=1`."""
    return sys.platform != "linux" or os.environ.get("MONARCH_NB_PORTABLE", "") not in ("", "0")


def has_pidfd() -> bool:
    """Returns whether pidfds work here (a kernel or sandbox may lack them)."""
    if portable() or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def boot_id() -> str:
    """Returns the id of this machine's boot; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def rdma_devices(*, closed: bool = False) -> tuple[str, ...]:
    """Returns names of this machine's RDMA devices, such as mlx5_0: usable ones, or with `closed` the unusable ones."""
    names = []
    for device in sorted(Path("/sys/class/infiniband_verbs").glob("uverbs*")):
        with contextlib.suppress(OSError):
            if os.access(f"/dev/infiniband/{device.name}", os.R_OK | os.W_OK) is not closed:
                names.append((device / "ibdev").read_text().strip())
    return tuple(names)


def become_subreaper() -> bool:
    """Makes orphaned descendants children of this process."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> bool:
    """Sets the name `ps` and `top` show (15 bytes)."""
    return _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def die_first_for_memory() -> bool:
    """Makes the kernel end this process, and those that it starts, before all others when memory runs out.

    Processes with the same score die in the order of size. A lower score may be written again later.
    """
    if portable():
        return False
    try:
        Path("/proc/self/oom_score_adj").write_text(f"{OOM_SCORE_ADJ_MAX}\n")
    except OSError:
        return False
    return True


def processor_time(pid: int) -> float | None:
    """Returns processor seconds of a process, all its threads together, or None if unknown. Does not wake it."""
    if portable():
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid() gives
    except OSError:
        return None


def times_paused(thread: int) -> int:
    """Returns how often a thread, by native number, has stopped running to wait; -1 where that is not counted."""
    try:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return -1


def memory_used() -> tuple[int, str]:
    """Returns the bytes of memory that this process costs, and the measure. Takes milliseconds.

    "Pss", where the kernel has it: a page that n processes share counts as a part of n. Else "private", memory that is
    not shared through a file, or "peak", the most that was resident so far.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _kilobytes("/proc/self/smaps_rollup", "Pss"), "Pss"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _kilobytes("/proc/self/status", "RssAnon"), "private"
    return _peak(), "peak"


def memory_resident() -> tuple[int, int]:
    """Returns the bytes of all pages that this process has in memory, shared ones too, and their peak. Cheap."""
    peak = _peak()
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _kilobytes("/proc/self/status", "VmRSS"), peak
    return peak, peak


def memory_limit() -> tuple[int, int]:
    """Returns the bytes that this machine, or container, has for all processes, and how many are free; 0 if unknown."""
    total = free = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        total, free = _kilobytes("/proc/meminfo", "MemTotal"), _kilobytes("/proc/meminfo", "MemAvailable")
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory" / "memory.limit_in_bytes", group / "memory" / "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", for none
            most = int(limit.read_text())
            if most < total or not total:
                total, free = most, max(0, most - int(used.read_text()))
    return total, free


def process_memory(pid: int) -> int:
    """Returns the bytes that a process has in memory, 0 where that is not known. Does not wake it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _kilobytes(path: str, name: str) -> int:
    """Returns a field of a file of /proc, in bytes. Raises OSError, ValueError, KeyError."""
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            field, _, rest = line.partition(":")
            if field == name:
                return int(rest.split()[0]) << 10
    raise KeyError(name)


def process_state(pid: int) -> tuple[str, int]:
    """Returns the letter of a process's state, and its start, in clock ticks since the boot whatever clocks are set to.

    Raises FileNotFoundError or ProcessLookupError if there is none, OSError if that cannot be found out.
    """
    fields = _stat(pid)
    return fields[0], int(fields[19])


def child_processes() -> list[int]:
    """Returns the processes that this one has started and that live; none where that is not known."""
    own_pid, pids = str(os.getpid()), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                letter, parent = _stat(int(name))[:2]
                if parent == own_pid and letter != "Z":
                    pids.append(int(name))
    return pids


def _stat(pid: int) -> list[str]:
    """Returns the fields of a process in /proc from its state on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def state_letter(pid: int) -> str:
    """Returns the letter of the state of a process, or of a thread by its native number; "" where it is not known."""
    try:
        return process_state(pid)[0]
    except (OSError, ValueError, IndexError):
        return ""


def seconds_since(ticks: int) -> float:
    """Returns the seconds since a time in ticks after the boot, including the machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def thread_count() -> int:
    """Returns the threads of this process, or 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def die_with_pipe(fd: int) -> int | None:
    """Makes the kernel SIGKILL this process's group when the last writer of pipe `fd` has ended.

    The kernel delivers it even to a process that is stopped or sits in C code with the GIL held. The pipe must never
    carry data. A parent-death signal would not do: it fires when the thread that forked ends. Returns the descriptor
    that must stay open for it, or None where this is not possible.
    """
    if portable():
        return None
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        return None
    if poll_readable(own):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return own


def poll_readable(fd: int) -> bool:
    """Returns whether `fd` has data or has ended, without waiting."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def close_other_fds(keep: set[int]) -> None:
    """Closes every descriptor from 3 up, save `keep`."""
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in keep:
                _close(fd)
        return
    except OSError:
        pass
    limit = os.sysconf("SC_OPEN_MAX")
    edges = [2, *sorted(fd for fd in keep if fd > 2), limit if limit > 0 else 65536]
    for low, high in itertools.pairwise(edges):
        os.closerange(low + 1, high)


def open_fds() -> set[int]:
    """Returns the descriptors from 3 up that are open."""
    listed = [int(fd) for fd in os.listdir("/proc/self/fd")]  # with one for the list, which is closed now
    return {fd for fd in listed if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")}


def watch_folder(path: str) -> int | None:
    """Returns an inotify descriptor that becomes readable when a file in `path` is written to; None without inotify."""
    if portable():
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, os.fsencode(path), IN_MODIFY) < 0:
        os.close(fd)
        return None
    return fd


def keep_freed_memory() -> bool:
    """Makes malloc keep up to half a gigabyte of freed memory, unless the environment has settings of malloc's own.

    A step of training frees its memory, and allocates it again in the next step. glibc returns it to the kernel
    each time where a thread other than the first allocates, and each page then costs a fault.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if portable() or configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((M_MMAP_THRESHOLD, OWN_MAPPING), (M_TRIM_THRESHOLD, KEPT_FREE))
    return mallopt is not None and all(mallopt(setting, value) for setting, value in settings)


def line_buffer_c_stdio() -> None:
    """Makes C libraries write their output line by line, so that a SIGKILL loses none of it."""
    try:
        libc = ctypes.CDLL(None)
        for name in ("stdout", "__stdoutp"):
            if hasattr(libc, name):
                libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 1, ctypes.c_size_t(0))
                return
    except (OSError, ValueError, AttributeError):
        pass


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # the listing's own descriptor


def _prctl(option: int, value: object) -> bool:
    if portable():
        return False
    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def punch_hole(fd: int, start: int, length: int) -> bool:
    """Frees the disk space of a part of a file, which keeps its size and reads as zeros there."""
    if portable():
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        offset = ctypes.c_int64
        return int(libc.fallocate64(fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, offset(start), offset(length))) == 0
    except (OSError, AttributeError):
        return False
