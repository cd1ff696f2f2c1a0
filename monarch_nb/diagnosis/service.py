"""The evidence of one process: endpoints under way with their stacks, and the newest collectives of its groups."""

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.collectives.service import answer_aside
from monarch_nb.collectives.threads import FlightRecord
from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.verbs import (
    BEGIN_TIMES,
    END_TIMES,
    INSPECT,
    AwaitedCall,
    BeginTimes,
    BegunTimes,
    EndpointRun,
    EndTimes,
    Evidence,
    Inspect,
    NewestCollective,
    RankTimes,
    StackLine,
)
from monarch_nb.host.linux import state_letter
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.wire import ENGINE, Asker, is_users_file

if TYPE_CHECKING:
    from monarch_nb.diagnosis.slow_rank import TimeSampler

MOST_LINES = 12  # of a stack


class Inspection:
    """Answers what this process runs."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._samplers: dict[tuple[str, int], TimeSampler] = {}
        runtime.verbs.handle(INSPECT, self._inspect)
        runtime.verbs.handle(BEGIN_TIMES, self._begin)
        runtime.verbs.handle(END_TIMES, self._end)

    def _inspect(self, _: Inspect, asker: Asker[Evidence]) -> None:
        answer_aside(self.evidence, asker, "diagnosis")  # the recorder of thousands takes a tenth of a second to read

    def _begin(self, wanted: BeginTimes, asker: Asker[BegunTimes]) -> BegunTimes:
        key = (asker.src, wanted.number)
        if key not in self._samplers:
            module = import_module("monarch_nb.diagnosis.slow_rank")
            self._samplers[key] = module.TimeSampler(self._runtime)
        return BegunTimes(time.time_ns())

    def _end(self, wanted: EndTimes, asker: Asker[RankTimes]) -> None:
        sampler = self._samplers.pop((asker.src, wanted.number), None)
        if sampler is None:
            asker.refuse("it was not sampled")
        else:
            answer_aside(sampler.stop, asker, "diagnosis")

    def evidence(self) -> Evidence:
        """What this process runs. Any thread."""
        now = time.time_ns()
        newest, recorded = PROCESS_GROUPS.newest()
        frames = sys._current_frames()
        running = tuple(self._running(tuple(self._runtime.cells.values()), frames))
        module = sys.modules.get("torch.distributed")
        joined = module is not None and module.is_available() and module.is_initialized()
        return Evidence(
            running,
            tuple(_collective(key, record, now) for key, record in newest),
            tuple(PROCESS_GROUPS.keys().values()),
            module.get_rank() if joined and module is not None else -1,
            recorded,
        )

    def _running(self, cells: tuple[ActorCell, ...], frames: dict[int, FrameType]) -> Iterator[EndpointRun]:
        for cell in cells:
            running = cell.running
            if running is None:
                continue
            call, endpoint, since = running
            thread = cell.executor.thread
            yield EndpointRun(
                cell.mesh,
                cell.rank,
                cell.spec.name,
                endpoint,
                call,
                time.monotonic() - since,
                thread.ident or 0,
                _lines(frames.get(thread.ident or 0)),
                state_letter(thread.native_id or 0),
                _processor_seconds(thread.native_id or 0),
                _transferred(thread.native_id or 0),
                tuple(self._waits(cell)),
            )

    def _waits(self, cell: ActorCell) -> Iterator[AwaitedCall]:
        call = self._runtime.calls.get(self._runtime.waits.awaited_by(cell))
        if call is not None:
            yield AwaitedCall(call.title, call.mesh, tuple(call.missing_ranks()))


def _collective(key: GroupKey, record: FlightRecord, now: int) -> NewestCollective:
    name = record.profiling_name.partition(":")[2] or record.profiling_name
    types = record.input_dtypes if isinstance(record.input_dtypes, list) else []
    sizes = record.input_sizes if isinstance(record.input_sizes, list) else []
    what = ", ".join(f"{kind} {size}" for kind, size in zip(types, sizes, strict=False))
    began = (now - record.time_created_ns) / 1e9
    return NewestCollective(key, record.collective_seq_id, name, what, not record.has_ended, began, record.thread)


def _lines(frame: FrameType | None) -> tuple[StackLine, ...]:
    """The user's part of a stack, innermost first: from the library's code that runs endpoints inwards."""
    lines: list[StackLine] = []
    while frame is not None and len(lines) < MOST_LINES:
        code = frame.f_code
        if not code.co_filename.startswith(ENGINE):
            line = frame.f_lineno or code.co_firstlineno
            lines.append(StackLine(code.co_filename, line, code.co_qualname, is_users_file(code.co_filename)))
        elif any(line.users for line in lines):
            break
        frame = frame.f_back
    return tuple(lines)


def _processor_seconds(thread: int) -> float:
    """Processor time of a thread; 0.0 where the system does not measure it."""
    try:
        return time.clock_gettime((~thread << 3) | 6)  # Linux' clock of a thread by its number
    except (OSError, OverflowError):
        return 0.0


def _transferred(thread: int) -> int:
    """Bytes that a thread has read and written; 0 where the system does not count them."""
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/self/task/{thread}/io").read_text().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def attach(runtime: Runtime) -> Inspection:
    """Registers the handler of this process."""
    return Inspection(runtime)
