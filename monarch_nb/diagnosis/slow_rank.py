"""Samples of one process's time, taken for some seconds: its part of `stragglers`."""

import dis
import gc
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

from monarch_nb._package import imported
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.diagnosis.verbs import BegunCollectives, CallTime, RankTimes, TimeSpent
from monarch_nb.gpu import load
from monarch_nb.host.linux import state_letter
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.wire import ENGINE, is_users_file

PERIOD_S = 0.005
MOST_COST = 0.03  # of the time: if a sample takes longer, fewer are taken
MOST_SECONDS = 600.0
MOST_FRAMES = 200
MOST_LINES = 100  # those that took the most time
HISTORY_S = 60.0  # of earlier collectives of the same call

IDLE, COLLECTIVE, REPLIES, COLLECTS = "idle", "collective", "replies", "garbage collection"
WAITING = frozenset({IDLE, COLLECTIVE})  # phases in which a rank waits for others
# The phase of a stack, by the first of these parts of PyTorch's code that it contains.
_PHASES = (
    ("data iterator", f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"),
    ("optimizer", f"{os.sep}torch{os.sep}optim{os.sep}"),
    ("backward", f"{os.sep}torch{os.sep}autograd{os.sep}"),
    ("forward", f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py"),
)
_WAITS = frozenset({"wait", "wait_tensor", "wait_stream", "barrier", "monitored_barrier", "synchronize"})
# PyTorch's code that dispatches operations; the callers' code has their names.
_OPERATIONS = (f"{os.sep}torch{os.sep}_ops.py", f"{os.sep}torch{os.sep}_library{os.sep}")
_BACKWARD = "run_backward"  # DistributedDataParallel waits for its collectives in it


class _Code:
    """Properties of a code object."""

    __slots__ = ("callees", "code", "is_of_operations", "is_ours", "is_users", "phase")

    def __init__(self, code: CodeType) -> None:
        file = code.co_filename
        self.code = code  # keeps its identity
        self.callees: dict[int, str] = {}
        self.is_of_operations = any(part in file for part in _OPERATIONS)
        self.is_users, self.is_ours = is_users_file(file), file.startswith(ENGINE)
        self.phase = next((index for index, (_, part) in enumerate(_PHASES) if part in file), len(_PHASES))

    def callee(self, offset: int) -> str:
        """Returns the name of the function that the instruction at `offset` calls; "" if it calls none."""
        name = self.callees.get(offset)
        if name is None:
            name = self.callees[offset] = callee_of(self.code, offset)
        return name


def callee_of(code: CodeType, offset: int) -> str:
    """Returns the name of the function that an instruction calls, as in the source; "" if it calls none."""
    names: dict[tuple[int | None, int | None], str] = {}  # of the last name that begins at a position
    callee = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            break
        positions = instruction.positions
        begins = (None, None) if positions is None else (positions.lineno, positions.col_offset)
        callee = names.get(begins, "") if "CALL" in instruction.opname else ""
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
            names[begins] = instruction.argval
    return callee


class TimeSampler:
    """Samples the endpoint that runs in a process: the phase of its step, and the line of the user's program.

    A sample counts for the time since the previous one. Sampling begins at once, and ends after ten minutes.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._over = threading.Event()
        self._seconds, self._samples = 0.0, 0
        self._spent: dict[tuple[str, str], float] = {}  # by phase and line
        self._calls: dict[str, CallTime] = {}
        self._newest = ("", "", 0.0)  # phase, line and seconds of the newest sample
        self._codes: dict[int, _Code] = {}
        runs = [
            time.monotonic() - now[2] for cell in tuple(runtime.cells.values()) if (now := cell.running) is not None
        ]
        self._since_ns = time.time_ns() - int(1e9 * min(HISTORY_S, max(runs, default=0.0)))
        self._collecting = 0.0
        self._collected: dict[int, float] = {}  # seconds since the last sample, by thread
        self._queued, self._throttled = _queued_seconds(runtime), _throttled_seconds()
        self._thread = threading.Thread(target=self._run, name="monarch-times", daemon=True)
        self._thread.start()

    def stop(self) -> RankTimes:
        """Ends sampling, and returns how the time was spent. Blocks for a moment."""
        self._over.set()
        self._thread.join()
        gpu = load()
        return RankTimes(
            self._seconds,
            self._samples,
            self._longest(),
            tuple(self._calls.values()),
            tuple(_begun(self._since_ns)),
            max(0.0, _queued_seconds(self._runtime) - self._queued),
            max(0.0, _throttled_seconds() - self._throttled),
            *((gpu.slowed, gpu.share) if gpu is not None else ()),
        )

    def _run(self) -> None:
        gc.callbacks.append(self._note_collection)
        try:
            before = time.monotonic()
            end, pause = before + MOST_SECONDS, PERIOD_S
            while not self._over.wait(pause) and before < end:
                now, ran = time.monotonic(), time.thread_time()
                self._sample(tuple(self._runtime.cells.values()), now - before)
                cost = time.thread_time() - ran
                before, pause = now, max(PERIOD_S - (time.monotonic() - now), cost / MOST_COST)
        finally:
            gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, _: object) -> None:
        """Notes the time of a garbage collection, during which no other thread runs."""
        now = time.perf_counter()
        if phase == "start":
            self._collecting = now
        elif self._collecting:
            thread = threading.get_ident()
            self._collected[thread] = self._collected.get(thread, 0.0) + now - self._collecting

    def _sample(self, cells: Iterable[ActorCell], seconds: float) -> None:
        """Takes one sample, which stands for so many seconds."""
        collected, self._collected = self._collected, {}
        self._seconds += seconds
        self._samples += 1
        running = [(cell, now) for cell in cells if (now := cell.running) is not None]
        if not running:
            self._add(IDLE, "", seconds)
            self._newest = (IDLE, "", seconds)
            return
        cell, (call, endpoint, _) = min(running, key=lambda pair: pair[1][2])  # the longest-running one
        thread = cell.executor.thread
        frame = sys._current_frames().get(thread.ident or 0)
        phase, source = self._phase_and_line(frame, thread.native_id or 0)
        if frame is not None and hasattr(cell.obj, "operation_name"):  # of sharded tensors: none of the user's code
            source = cell.obj.operation_name(frame) or source
        if self._runtime.waits.awaited_by(cell):
            phase = REPLIES
        paused = collected.get(thread.ident or 0, 0.0)
        if paused > seconds:  # the sample before was taken as the collection ended, and its length was not known yet
            self._move(min(paused - seconds, self._newest[2]))
            paused = seconds
        self._add(COLLECTS, source, paused)
        self._add(phase, source, seconds - paused)
        self._newest = phase, source, seconds - paused
        before = self._calls.get(call)
        title = f"{cell.spec.name}.{endpoint}"
        self._calls[call] = CallTime(call, title, seconds + (before.seconds if before else 0.0))

    def _move(self, seconds: float) -> None:
        """Reassigns time of the newest sample to a garbage collection."""
        phase, source, _ = self._newest
        self._add(phase, source, -seconds)
        self._add(COLLECTS, source, seconds)

    def _add(self, phase: str, source: str, seconds: float) -> None:
        key = (phase, source)
        self._spent[key] = self._spent.get(key, 0.0) + seconds

    def _phase_and_line(self, frame: FrameType | None, thread: int) -> tuple[str, str]:
        """Returns the phase, and the innermost line of the user's program."""
        source, phase, called, is_call = "", len(_PHASES), "", True
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            code = self._codes.get(id(frame.f_code))
            if code is None:
                code = self._codes[id(frame.f_code)] = _Code(frame.f_code)
            if code.is_ours and source:
                break
            if is_call:
                called = code.callee(frame.f_lasti)  # a function in C, for it has no frame
                is_call = code.is_of_operations
            phase = min(phase, code.phase)
            if not source and code.is_users:
                source = f"{code.code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        if (
            (called in _WAITS or (called == _BACKWARD and not _uses_gpu()))
            and _is_distributed()
            and state_letter(thread) == "S"
        ):
            return COLLECTIVE, source
        return _PHASES[phase][0] if phase < len(_PHASES) else "", source

    def _longest(self) -> tuple[TimeSpent, ...]:
        """Returns the lines that took the most time."""
        most = sorted(self._spent.items(), key=lambda item: -item[1])
        listed = [TimeSpent(phase, source, seconds) for (phase, source), seconds in most[:MOST_LINES] if seconds > 0]
        rest = sum(seconds for _, seconds in most[MOST_LINES:])
        return (*listed, TimeSpent("", "", rest)) if rest else tuple(listed)


def _is_distributed() -> bool:
    module = imported("torch.distributed")
    return module is not None and module.is_available() and bool(module.is_initialized())


def _uses_gpu() -> bool:
    """Returns whether backward passes run on a GPU, on their own threads: then a thread asleep in one may compute."""
    module = imported("torch.cuda")
    return module is not None and bool(module.is_initialized())


def _begun(since: int) -> Iterable[BegunCollectives]:
    for key, records in PROCESS_GROUPS.history(since):
        times = {record.collective_seq_id: record.time_created_ns for record in records}
        yield BegunCollectives(key, tuple(times), tuple(times.values()))


def _queued_seconds(runtime: Runtime) -> float:
    """Returns how long the threads of endpoints have waited for a processor; 0.0 where the system does not count it."""
    total = 0
    for cell in tuple(runtime.cells.values()):
        try:
            total += int(Path(f"/proc/self/task/{cell.executor.thread.native_id}/schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return total / 1e9


def _throttled_seconds() -> float:
    """Returns how long a limit of the container has kept this process from its processors; 0.0 without a limit."""
    try:
        fields = dict(line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        return int(fields["throttled_usec"]) / 1e6
    except (OSError, ValueError, KeyError):
        return 0.0
