"""Leftovers of jobs that ended by themselves: folders with keys and logs, here and on the machines of their hosts.

Processes that use a job hold a shared lock on a file in its folder, which keeps others from removing it.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from monarch_nb.job.adapter import JOB_FILE, PREFIX, JobAdapter, Running, kept_jobs

_USED = "used"  # the file that is locked
KEPT_S = 86400.0  # how long the logs of a job that has ended by itself are kept, unless they are removed by request
_HALF_MADE_S = 3600.0  # age of a folder without a job, of a program that was killed as it started one
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FolderUse:
    """Use of a job's folder, until this is closed, or nothing refers to `owner` any more."""

    def __init__(self, owner: object, folder: str) -> None:
        self.folder = folder
        fd = os.open(Path(folder, _USED), _OPEN, 0o600)
        with contextlib.suppress(OSError):  # no locks on that file system
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._closing = weakref.finalize(owner, os.close, fd)
        _uses.add(self)

    def close(self) -> None:
        """Ends this owner's use of the folder."""
        self._closing()


_uses: weakref.WeakSet[FolderUse] = weakref.WeakSet()


def end_uses(folder: str) -> None:
    """Ends the use of a folder by all objects of this process, as its job was killed."""
    for use in tuple(_uses):
        if use.folder == folder:
            use.close()


def tidy_soon(kind: str, adapter: JobAdapter) -> None:
    """Removes leftovers of jobs of a kind in the background; logs of the last day remain."""
    threading.Thread(target=lambda: list(tidied(kind, adapter)), name="monarch-job-tidy", daemon=True).start()


def tidied(kind: str, adapter: JobAdapter, keep_s: float = KEPT_S, report: Callable[[str], object] = lambda text: None
           ) -> Iterator[Running]:  # fmt: skip
    """Removes leftovers of jobs of a kind that have ended: keys at once, all else after `keep_s` seconds.

    Yields those of which nothing is left. `report` is called with a text for each failure. Blocks while the
    scheduler is asked, unless there are no leftovers of its jobs here.
    """
    try:
        jobs = kept_jobs(adapter.folder(), kind)
    except OSError as error:
        report(f"{kind}: {error}")
        return
    for job in jobs.values():
        try:
            if _tidied(adapter, job, keep_s):
                yield job
        except Exception as error:  # errors of the scheduler
            report(f"{kind} job {job.job[:8]} stays as it is: {error}")
    _sweep_half_made(adapter.folder())


def _tidied(adapter: JobAdapter, job: Running, keep_s: float) -> bool:
    folder = Path(job.folder)
    with _unused(folder) as free:
        if not free or any(state.state != "ended" for state in adapter.look(job).values()):
            return False
        if time.time() - newest(folder) < keep_s:
            (folder / "key").unlink(missing_ok=True)
            return False
        adapter.kill(job)  # removes its remains at the scheduler and on its machines
        shutil.rmtree(folder, ignore_errors=True)
        return True


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Yields whether no process uses a job; if so, none can start to use it within the context."""
    try:
        fd = os.open(folder / _USED, _OPEN, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:  # no locks on that file system
        free = time.time() - newest(folder) > KEPT_S
    try:
        yield free
    finally:
        os.close(fd)


def newest(folder: Path) -> float:
    """Returns the time of the last change in a folder, other than of the lock."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.name not in (_USED, "key"):
                times.append(path.lstat().st_mtime)
    return max(times[1:], default=times[0])


def _sweep_half_made(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            own = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
            if own and not (path / JOB_FILE).exists() and time.time() - newest(path) > _HALF_MADE_S:
                with _unused(path) as free:
                    if free:
                        shutil.rmtree(path, ignore_errors=True)
