"""The stacks of a process that cannot reply, such as one in C code: written by a signal handler in C."""

import faulthandler
import os
import signal
from pathlib import Path

from monarch_nb.wire import parse_address

# A signal that nothing else uses; its default action is to end a process, hence never sent without the file.
SIGNAL: int = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0


def file_of(run_folder: str | Path, address: str) -> Path:
    """Returns the file for a process's stacks."""
    return Path(run_folder) / f"stacks-{parse_address(address).name}"


def register(run_folder: str | Path, address: str) -> None:
    """Makes SIGNAL write this process's stacks into that file from now on. On the main thread."""
    if not SIGNAL or not hasattr(faulthandler, "register"):
        return
    try:
        descriptor = os.open(file_of(run_folder, address), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:  # a full disk is no reason not to start
        return
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
