"""The evidence of one process: endpoints under way with stacks, and the newest collectives of its groups."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from monarch_nb._package import imported
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.collectives.service import answer_aside
from monarch_nb.collectives.threads import FlightRecord, is_torchs
from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.locks import LockWaits
from monarch_nb.diagnosis.verbs import (
    BEGIN_TIMES,
    END_TIMES,
    INSPECT,
    MEMORY,
    AskMemory,
    AwaitedCall,
    BeginTimes,
    BegunTimes,
    EndpointRun,
    EndTimes,
    Evidence,
    Inspect,
    NewestCollective,
    ProcessMemory,
    RankTimes,
    StackLine,
)
from monarch_nb.host.linux import child_processes, processor_time, state_letter, times_paused
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.runtime.actors.executors import ActorRun, frames_of, queued_calls, runs_of
from monarch_nb.wire import ENGINE, Asker, is_users_file

if TYPE_CHECKING:
    from monarch_nb.diagnosis.slow_rank import TimeSampler

MOST_LINES = 12  # of a stack
MOST_COLLECTIVES = 16  # of a group
# Kernel functions in which a thread waits that only another thread, or a timer, can wake.
_NO_FILES = ("futex", "hrtimer", "do_nanosleep")
_CHILD_MODULES = tuple(
    os.sep + os.path.join(*parts)
    for parts in (("subprocess.py",), ("multiprocessing", ""), ("torch", "utils", "data", ""))
)
# Functions of torch.distributed that wait for a message of one rank, and the variable with that rank.
_PEERS = {"recv": ("group_src", "src"), "send": ("group_dst", "dst")}


class Inspection:
    """Answers inspections of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._samplers: dict[tuple[str, int], TimeSampler] = {}
        self._paused: dict[int, tuple[int, float]] = {}  # how often threads have stopped, since when
        runtime.verbs.handle(INSPECT, self._inspect)
        runtime.verbs.handle(BEGIN_TIMES, self._begin)
        runtime.verbs.handle(END_TIMES, self._end)
        runtime.verbs.handle(MEMORY, self._memory)

    def _inspect(self, _: Inspect, asker: Asker[Evidence]) -> None:
        answer_aside(self.evidence, asker, "diagnosis")  # reading thousands of records takes a tenth of a second

    def _memory(self, _: AskMemory, asker: Asker[ProcessMemory]) -> None:
        answer_aside(import_module("monarch_nb.diagnosis.memory_rank").memory_use, asker, "diagnosis")

    def _begin(self, body: BeginTimes, asker: Asker[BegunTimes]) -> BegunTimes:
        key = (asker.src, body.number)
        if key not in self._samplers:
            module = import_module("monarch_nb.diagnosis.slow_rank")
            self._samplers[key] = module.TimeSampler(self._runtime)
        return BegunTimes(time.time_ns())

    def _end(self, body: EndTimes, asker: Asker[RankTimes]) -> None:
        sampler = self._samplers.pop((asker.src, body.number), None)
        if sampler is None:
            asker.refuse("it was not sampled")
        else:
            answer_aside(sampler.stop, asker, "diagnosis")

    def evidence(self) -> Evidence:
        """Returns the endpoints, collectives and locks of this process. Any thread."""
        now = time.time_ns()
        remembered, recorded = PROCESS_GROUPS.remembered()
        frames = sys._current_frames()
        threads = {thread.native_id for thread in threading.enumerate()}
        self._paused = {thread: state for thread, state in self._paused.items() if thread in threads}
        locks = LockWaits(frames)
        running = tuple(self._running(tuple(self._runtime.cells.values()), frames, locks))
        since = now - int(1e9 * max((run.seconds for run in running), default=0.0))
        module = imported("torch.distributed")
        joined = module is not None and module.is_available() and module.is_initialized()
        return Evidence(
            running,
            tuple(_collective(key, records, now, since) for key, records in remembered),
            tuple(PROCESS_GROUPS.keys().values()),
            module.get_rank() if joined and module is not None else -1,
            recorded,
            locks.circle(),
        )

    def _running(
        self, cells: tuple[ActorCell, ...], frames: dict[int, FrameType], locks: LockWaits
    ) -> Iterator[EndpointRun]:
        for cell in cells:
            for run in runs_of(cell):
                yield self._run(cell, run, frames, locks)

    def _run(self, cell: ActorCell, run: ActorRun, frames: dict[int, FrameType], locks: LockWaits) -> EndpointRun:
        slow_rank = import_module("monarch_nb.diagnosis.slow_rank")
        thread = cell.executor.thread
        native, frame = thread.native_id or 0, frames.get(thread.ident or 0)
        lines = _lines(frames_of(run, frame))
        children = child_processes() if _is_for_children(lines) else []
        helpers = _helpers(thread)
        idle = self._idle_seconds(native)
        return EndpointRun(
            cell.mesh,
            cell.rank,
            cell.spec.name,
            run.endpoint,
            run.call,
            time.monotonic() - run.since,
            thread.ident or 0,
            lines,
            state_letter(native),
            _processor_seconds(native),
            _transferred(native),
            tuple(self._waits(cell)),
            "" if frame is None else slow_rank.callee_of(frame.f_code, frame.f_lasti),
            tuple(_peers(frame)),
            _wake_count(native),
            sum(map(_processor_seconds, helpers)) + sum(processor_time(child) or 0.0 for child in children),
            bool(children),
            idle,
            locks.of(thread.ident or 0),
            sum(max(0, _wake_count(helper)) for helper in helpers),
            sum(max(0, times_paused(helper)) for helper in helpers),
            queued_calls(cell),
        )

    def _idle_seconds(self, thread: int) -> float:
        """Returns the seconds for which a thread has not run, as far as earlier inspections show."""
        now, paused = time.monotonic(), times_paused(thread)
        before, since = self._paused.get(thread, (-1, now))
        if paused < 0 or paused != before:
            since = now
        self._paused[thread] = (paused, since)
        return now - since

    def _waits(self, cell: ActorCell) -> Iterator[AwaitedCall]:
        call = self._runtime.calls.get(self._runtime.waits.awaited_by(cell))
        if call is not None:
            yield AwaitedCall(call.title, call.mesh, tuple(call.missing_ranks()))


def _collective(key: GroupKey, records: Sequence[FlightRecord], now: int, since: int) -> NewestCollective:
    """Returns the newest collective of a group. The call under way began at `since`, by the wall clock like `now`."""
    newest, last = records[-1], dict[int, str]()
    for record in records[-MOST_COLLECTIVES:]:  # several are one where they are coalesced
        text = f"{_name(record)} of {_inputs(record)}" if _inputs(record) else _name(record)
        last[record.collective_seq_id] = " and ".join(filter(None, [last.get(record.collective_seq_id), text]))
    if len(records) > MOST_COLLECTIVES:
        del last[next(iter(last))]  # it may be part of a coalesced one
    times = [record.time_created_ns for record in records if record.time_created_ns >= since]
    return NewestCollective(
        key,
        newest.collective_seq_id,
        _name(newest),
        _inputs(newest),
        not newest.has_ended,
        (now - newest.time_created_ns) / 1e9,
        newest.thread,
        tuple(last.items()),
        max((after - before for before, after in pairwise(times)), default=0) / 1e9,
    )


def _name(record: FlightRecord) -> str:
    return record.profiling_name.partition(":")[2] or record.profiling_name


def _inputs(record: FlightRecord) -> str:
    types = record.input_dtypes if isinstance(record.input_dtypes, list) else []
    sizes = record.input_sizes if isinstance(record.input_sizes, list) else []
    return ", ".join(f"{kind} {size}" for kind, size in zip(types, sizes, strict=False))


def _peers(frame: FrameType | None) -> Iterator[int]:
    """Yields the rank of torch.distributed for whose message a thread waits, if any."""
    while frame is not None:
        names = _PEERS.get(frame.f_code.co_name)
        if names is not None and is_torchs(frame):
            values = frame.f_locals
            group, source = values.get("group"), values.get(names[0])
            rank = values.get(names[1])
            if isinstance(source, int) and group is not None:
                with contextlib.suppress(Exception):
                    rank = sys.modules["torch.distributed"].get_global_rank(group, source)
            if isinstance(rank, int):
                yield rank
            return
        frame = frame.f_back


def _is_for_children(lines: Iterable[StackLine]) -> bool:
    """Returns whether a stack ends in functions that wait for other processes."""
    for line in lines:
        if line.users:
            return False
        if any(part in line.file for part in _CHILD_MODULES):
            return True
    return False


def _helpers(own: threading.Thread) -> list[int]:
    """Returns the native numbers of the program's other threads."""
    threads = (thread for thread in threading.enumerate() if not thread.name.startswith("monarch"))
    return [thread.native_id or 0 for thread in threads if thread is not own]


def _wake_count(thread: int) -> int:
    """Returns how often a thread that waits for a file or a connection was woken; -1 if it waits for anything else."""
    folder = f"/proc/self/task/{thread}"
    try:
        waits_in = Path(folder, "wchan").read_text()
        if waits_in in ("", "0") or waits_in.startswith(_NO_FILES):
            return -1
    except OSError:
        return -1
    return times_paused(thread)


def _lines(frames: Iterable[FrameType]) -> tuple[StackLine, ...]:
    """Returns the user's part of a stack, innermost first, up to the library's code that runs endpoints."""
    lines: list[StackLine] = []
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(ENGINE):
            line = frame.f_lineno or code.co_firstlineno
            lines.append(StackLine(code.co_filename, line, code.co_qualname, is_users_file(code.co_filename)))
        elif any(line.users for line in lines):
            break
        if len(lines) == MOST_LINES:
            break
    return tuple(lines)


def _processor_seconds(thread: int) -> float:
    """Returns the processor time of a thread; 0.0 where the system does not measure it."""
    try:
        return time.clock_gettime((~thread << 3) | 6)  # Linux' clock of a thread by its number
    except (OSError, OverflowError):
        return 0.0


def _transferred(thread: int) -> int:
    """Returns the bytes that a thread has read and written; 0 where the system does not count them."""
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/self/task/{thread}/io").read_text().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def attach(runtime: Runtime) -> Inspection:
    """Registers the handler of this process."""
    return Inspection(runtime)
