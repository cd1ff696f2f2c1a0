"""Ranks that are not stopped, and their activity, in meshes that have stopped ranks."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.records import Frame, Stopped, ThreadRecord
from monarch_nb.debug.render.groups import FileName, Missing, named, place, short, tree, tree_text
from monarch_nb.host.folders import run_folder_for
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.runtime import ActorState, MeshState, ProcState, proc_state_of
from monarch_nb.runtime.output.own_log import STACKS_SIGNAL, stacks_file
from monarch_nb.shape import places_of
from monarch_nb.store import describe
from monarch_nb.wire import host_of

LOOK_S = 0.3  # for the answers of ranks, while a table waits for them
MOST = 256  # ranks of a mesh; more are not asked
PATIENCE_S = 10.0
WRITES_S = 1.0  # for a process to write its stacks
_OURS = f"{Path(__file__).resolve().parents[2]}/"
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def missing(
    controller: Controller, records: Sequence[Stopped], name: FileName = short
) -> tuple[dict[str, int], list[Missing]]:
    """Returns sizes of the meshes of stopped ranks, and each mesh's ranks that are not stopped. Blocks a moment for
    the answers of these.
    """
    sizes: dict[str, int] = {}
    absent: list[Missing] = []
    for uid in dict.fromkeys(record.mesh for record in records if record.blocks_actor):
        state = controller.runtime.meshes.get(uid)
        if not isinstance(state, ActorState):
            continue
        ranks = list(state.region.ndslice)
        sizes[uid] = len(ranks)
        stopped = {record.rank for record in records if record.mesh == uid}
        rest = [rank for rank in ranks if rank not in stopped]
        if not rest:
            continue
        doing = _doing(controller, state, rest, name)
        points = {rank: tuple(state.region.point_of_base_rank(rank).values()) for rank in rest}
        absent.append(Missing(state.name, state.region.extent, {points[rank]: doing.get(rank, "") for rank in rest}))
    return sizes, absent


def _doing(controller: Controller, state: ActorState, ranks: Sequence[int], name: FileName) -> dict[int, str]:
    states = {rank.rank: rank.state for rank in describe(state).ranks}
    doing: dict[int, str] = {rank: states[rank] for rank in ranks if states[rank] not in ("idle", "busy")}
    alive = [rank for rank in ranks if rank not in doing]
    if not alive or len(alive) > MOST:
        return doing
    threads = controller.threads([state.procs.address(rank) for rank in alive], LOOK_S)
    for rank in alive:
        answer = threads[state.procs.address(rank)]
        if isinstance(answer, str):
            doing[rank] = "does not answer: %stacks shows more"
            continue
        thread = next((t for t in answer if (t.mesh, t.rank) == (state.uid, rank)), None)
        if thread is not None:
            doing[rank] = _doing_text(thread, name)
    return doing


def _doing_text(thread: ThreadRecord, name: FileName) -> str:
    if not thread.doing:
        return "idle"
    location = f", at {place(thread.stack[-1], name)}" if thread.stack else ""
    return f"runs {thread.doing}{location}"


def running_text(controller: Controller, records: Sequence[Stopped], name: FileName = short) -> str:
    """Returns the stacks of the running ranks of meshes that have stopped ranks."""
    stopped = {record.place for record in records}
    parts = []
    for uid in dict.fromkeys(record.mesh for record in records):
        state = controller.runtime.meshes.get(uid)
        if isinstance(state, ActorState):
            ranks = [rank for rank in state.region.ndslice if (uid, rank) not in stopped]
            parts.append(stacks_text(controller, state, ranks, name))
    return "\n".join(parts) or f"no rank runs: {named(records)} are stopped"


def stacks_text(controller: Controller, state: MeshState, ranks: Sequence[int], name: FileName = short) -> str:
    """Returns the Python stacks of some ranks of a mesh, merged into one tree; of processes those of all their actors.

    Blocks for at most some seconds.
    """
    procs = proc_state_of(state)
    threads = controller.threads([procs.address(rank) for rank in ranks])

    def label(names: Sequence[str]) -> str:
        return places_of(state.region, map(int, names)) or "it"

    def is_shown(thread: ThreadRecord, rank: int) -> bool:
        if state is not procs:
            return (thread.mesh, thread.rank) == (state.uid, rank)
        mesh = controller.runtime.meshes.get(thread.mesh)
        if mesh is None:  # of an actor that another one has spawned there
            return bool(thread.mesh)
        return proc_state_of(mesh) is procs and thread.rank == rank  # simulated processes share their threads

    stacks, idle, silent = [], [], []
    for rank in ranks:
        answer = threads[procs.address(rank)]
        if isinstance(answer, str):
            silent.append(str(rank))
            continue
        of_rank = [t for t in answer if t.stack and is_shown(t, rank)]
        stacks += [(str(rank), t.stack) for t in of_rank]
        if not of_rank:
            idle.append(str(rank))
    lines = tree_text(tree(stacks), label, name)
    if idle:
        lines.append(f"{len(idle)}  idle  [{label(idle)}]")
    if silent:
        lines += inspect_stacks(controller, procs, [int(rank) for rank in silent], label, name)
    return "\n".join(lines)


def py_spy() -> str | None:
    """Returns the path of py-spy; None if it is not installed."""
    path = Path(sys.executable).with_name("py-spy")
    return str(path) if path.exists() else shutil.which("py-spy")


def inspect_stacks(
    controller: Controller,
    procs: ProcState,
    ranks: Sequence[int],
    label: Callable[[Sequence[str]], str],
    name: FileName = short,
) -> list[str]:
    """Returns the stacks of ranks that do not answer, as lines; those of other machines cannot be inspected."""
    stacks: list[tuple[str, Sequence[Frame]]] = []
    silent: list[str] = []
    for rank in ranks:
        address = procs.address(rank)
        pid = controller.runtime.part(ProcessWatcher).pids.get(address, 0)
        process_stacks: list[Sequence[Frame]] = []
        if pid and host_of(address) in controller.runtime.local_hosts:
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                process_stacks = stacks_from_outside(address, pid)
        stacks += [(str(rank), stack) for stack in process_stacks]
        if not process_stacks:
            silent.append(str(rank))
    lines = tree_text(tree(stacks), label, name)
    if silent:
        reason = "in one long call in C, stopped, or on another machine, so its Python cannot say where"
        lines.append(f"{len(silent)}  {'does' if len(silent) == 1 else 'do'} not answer  [{label(silent)}]: {reason}")
    return lines


def stacks_from_outside(address: str, pid: int) -> list[Sequence[Frame]]:
    """Returns the stacks of a process's actors, outermost frame first: by py-spy, else by the process's handler.

    Raises OSError, ValueError, SubprocessError.
    """
    program = py_spy()
    if program is not None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            stacks = spied(program, pid)
            if stacks:
                return stacks
    return signalled(stacks_file(run_folder_for(host_of(address)), address), pid)


def spied(program: str, pid: int) -> list[Sequence[Frame]]:
    """Stacks read by py-spy, without help of the process."""
    done = subprocess.run(
        [program, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.strip() or f"py-spy ended with status {done.returncode}")
    return _actor_stacks(
        [Frame(frame["filename"], int(frame["line"] or 0), frame["name"]) for frame in reversed(thread["frames"])]
        for thread in json.loads(done.stdout)
    )


def signalled(file: Path, pid: int) -> list[Sequence[Frame]]:
    """Stacks that a signal handler, in C, writes to a file. Raises OSError."""
    before = file.stat().st_size  # the file exists if the process handles the signal
    os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + WRITES_S
    size, text = before, ""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = file.stat().st_size
        if now > before and now == size:
            with file.open(encoding="utf-8", errors="replace") as opened:
                opened.seek(before)
                text = opened.read()
            break
        size = now
    return parsed(text)


def parsed(text: str) -> list[Sequence[Frame]]:
    """Returns the actors' stacks in what faulthandler writes: threads one below the other, innermost frame first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if frame is not None and threads:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            threads[-1].insert(0, Frame(frame[1], number, frame[3]))
        elif line.startswith(("Thread ", "Current thread ")):
            threads.append([])
    return _actor_stacks(threads)


def _actor_stacks(threads: Any) -> list[Sequence[Frame]]:
    """Parts of stacks (outermost first) below the library's frames, of threads that run an actor."""
    stacks_of_actors = []
    for stack in threads:
        runs = [n for n, frame in enumerate(stack) if frame.file == f"{_OURS}runtime/actors/cell.py"]
        inner = stack[runs[-1] + 1 :] if runs else []
        while inner and inner[0].file.startswith(_OURS):
            del inner[0]
        while inner and inner[-1].file.startswith(_OURS):
            inner.pop()
        if inner:
            stacks_of_actors.append(inner)
    return stacks_of_actors
