"""Foreign programs that end with the process that has started them, whatever ends that."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from monarch_nb.host.launch import command, only_ours
from monarch_nb.host.linux import die_with_pipe


def start_bound(line: Sequence[str], *, errors: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
    """Starts a command in a session of its own, with its output as text at `stdout` and an empty input.

    Its end of a pipe binds it: the kernel closes ours even if this process is killed. A program that is not found ends
    with status 127, and an error on `errors`.
    """
    process = subprocess.Popen(
        command("monarch_nb.host.bound", *line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    only_ours(process.stdin)
    return process


def end_bound(process: "subprocess.Popen[str]") -> int:
    """Kills the program and what it has started; returns its status."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.wait()


def main(argv: Sequence[str]) -> int:
    """Becomes the program, or stays beside it where the kernel cannot bind it."""
    owner = os.dup(0)
    cord = die_with_pipe(owner)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        if cord is None:
            return _stay(argv, owner)
        os.set_inheritable(cord, True)
        os.execvp(argv[0], list(argv))
    except FileNotFoundError:
        sys.stderr.write(f"{argv[0]}: not found\n")
        return 127


def _stay(argv: Sequence[str], owner: int) -> int:
    child = subprocess.Popen(list(argv))

    def end_with_owner() -> None:
        while os.read(owner, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_owner, daemon=True).start()
    return child.wait()
