"""Checkpoints in a folder: which of them are complete, and what becomes of old ones and of attempts.

Each is a folder `step-00000050` of its own, which has another name, `.step-00000050.7f3a.part`, until all ranks have
written their parts of it.
"""

import os
import re
import shutil
from pathlib import Path

REST = "controller.pickle"  # what of the state is no sharded tensor
_COMPLETE = re.compile(r"step-(\d+)")
_ATTEMPT = re.compile(r"\.step-\d+\.\w+\.part")


def attempt(folder: str, step: int, mark: str) -> Path:
    """Where a checkpoint is written."""
    return Path(folder) / f".step-{step:08}.{mark}.part"


def complete(folder: str) -> list[int]:
    """Steps of complete checkpoints, the oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (_COMPLETE.fullmatch(name) for name in names)
    return sorted(int(one[1]) for one in found if one and (Path(folder) / one[0] / REST).exists())


def path_of(folder: str, step: int) -> Path:
    """Where a complete one is."""
    return Path(folder) / f"step-{step:08}"


def finish(written: Path, step: int, rest: bytes, keep: int) -> None:
    """All ranks have written: it is complete from now on, and all but the `keep` latest go. Raises OSError."""
    folder = written.parent
    with open(written / REST, "wb") as file:
        file.write(rest)
        file.flush()
        os.fsync(file.fileno())
    final = path_of(str(folder), step)
    if final.exists():  # saved once more at the same step
        shutil.rmtree(final)
    os.replace(written, final)
    _sync(folder)
    for old in complete(str(folder))[:-keep]:
        shutil.rmtree(path_of(str(folder), old), ignore_errors=True)
    for name in os.listdir(folder):
        if _ATTEMPT.fullmatch(name):  # of a save that was cut off: saves come one after the other
            shutil.rmtree(folder / name, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
