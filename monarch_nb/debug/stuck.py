"""Processes that cannot tell where they are, since something in C holds them: looked at from outside."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monarch_nb.debug.controller import Controller
from monarch_nb.debug.groups import FileName, short, tree, tree_text
from monarch_nb.debug.records import Frame

PATIENCE_S = 10.0
_OURS = f"{Path(__file__).resolve().parent.parent}/"
HINT = "`pip install py-spy` shows where such ranks are (this machine's only)"


def py_spy() -> str | None:
    """Where py-spy is; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def look(
    controller: Controller,
    procs: Any,
    ranks: Sequence[int],
    label: Callable[[Sequence[str]], str],
    name: FileName = short,
) -> list[str]:
    """The stacks of ranks that do not answer, as lines; or what is needed to have them."""
    program = py_spy()
    stacks: list[tuple[str, Sequence[Frame]]] = []
    lines = []
    without: list[str] = []
    for rank in ranks:
        address = procs.address(rank)
        pid = controller.engine.keeper.pids.get(address, 0)
        if program is None or not pid or address.partition("/")[0] not in controller.engine.local_hosts:
            without.append(str(rank))
            continue
        try:
            stacks.append((str(rank), dump(program, pid)))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            lines.append(f"1  does not answer  [{label([str(rank)])}]  and py-spy says: {error}")
    if without:
        told = f"; {HINT}" if program is None else ""
        lines.append(f"{len(without)}  do not answer: held by one long call in C, or stopped  [{label(without)}]{told}")
    return [*tree_text(tree(stacks), label, name), *lines]


def dump(program: str, pid: int) -> list[Frame]:
    """The stack of the busiest of a process's threads, outermost first. Raises OSError, ValueError, SubprocessError."""
    done = subprocess.run(
        [program, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}")
    threads = json.loads(done.stdout)
    best: list[Frame] = []
    for thread in threads:
        stack = [
            Frame(frame["filename"], int(frame["line"] or 0), frame["name"]) for frame in reversed(thread["frames"])
        ]
        own = next((n + 1 for n in reversed(range(len(stack))) if stack[n].file.startswith(_OURS)), 0)
        rest = stack[own:]
        if rest and (thread.get("owns_gil") or not best):
            best = rest
    return best
