"""`timeline(mesh)`: the activity of each rank of a mesh over time, recorded while a block runs, or until `stop`.

It is written as a Chrome trace, which Perfetto and chrome://tracing open.
"""

import gzip
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, TypeAlias

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.profiling import verbs
from monarch_nb.profiling.measuring import CLOCKS_S, part_of_mesh, sort_answers
from monarch_nb.profiling.result import line_text
from monarch_nb.profiling.rows import MOST_GROUPS, ODD, CallEnds, GroupRow, TimelineRows
from monarch_nb.profiling.service import PROFILING
from monarch_nb.profiling.verbs import Began, BeginRecording, Recorded, RecordedCall, RecordedSpan, StopRecording
from monarch_nb.runtime import Future, MeshState, Runtime, current_runtime, when_done
from monarch_nb.shape import MeshTrait, places_of
from monarch_nb.store import store_of
from monarch_nb.store.events import Event, MeshFailed, RankStateChanged, SessionClosed, SessionOpened
from monarch_nb.transport import TransportError
from monarch_nb.wire import counted, first_line

_FOLLOWED = (MeshFailed, SessionClosed, SessionOpened, RankStateChanged)
_TURNS = {"failed": "lost", "healing": "healing", "alive": "", "stopped": ""}
_MARKS = 12  # breakpoints, deaths and heals that the text lists
_CALLS = 12  # endpoints that the text lists
PROMPT = 250  # ranks that send records twice a second; in larger meshes, each sends proportionally less often
CALLER = 0  # the process of the file with the calls of their sender; rank n is process n + 1
_TRACE_LANES = {"call": 0, "span": 1, "transfer": 2, "collective": 2, "pause": 3}
_TRACE_LANE_NAMES = ("calls", "spans", "collectives, transfers", "pauses")
_TRACE_COLOURS = {"lost": "terrible", "healing": "bad", "paused": "yellow"}
_numbers = itertools.count(1)

TraceEvent: TypeAlias = dict[str, object]


class Timeline:
    """The activity of the ranks of a mesh over time; `repr` and displays show it, also during the recording.

    Recording begins with the object, or with the block if it is used in `with`, and ends with `stop`, or the block.
    `notes` says what is missing and why.
    """

    def __init__(self, mesh: AnyMesh, runtime: Runtime) -> None:
        state: MeshState = state_of(mesh)
        procs = state_of(mesh) if isinstance(mesh, ProcMesh) else state_of(mesh).procs
        self.name = state.name
        self.region = region_of(mesh)
        self._mesh_region = state.region
        self.key = str(next(_numbers))
        self.notes: list[str] = []
        self.changes = 0  # the number of additions
        self.began = time.time()
        self.ended = 0.0  # 0 during the recording
        self._runtime, self._procs = runtime, procs
        self._uid = state.uid if isinstance(mesh, ActorMesh) else ""
        self._rows = TimelineRows(tuple(self.region.ranks()))
        self._ahead: dict[int, float] = {}  # seconds by which clocks of other hosts are ahead of this one
        self._sessions: dict[str, int] = {}  # ranks that are stopped in the debugger
        self._lock = threading.RLock()
        self._service = runtime.feature(PROFILING)
        add = weakref.WeakMethod(self._add)
        self._number = self._service.expect_timeline(lambda recorded: (bound := add()) is not None and bound(recorded))
        follow = weakref.WeakMethod(self._on_event)
        self._unfollow = store_of(runtime).follow(lambda event: (bound := follow()) and bound(event), *_FOLLOWED)
        weakref.finalize(self, self._unfollow)
        self._begin(self.region.ranks())

    def _begin(self, ranks: Sequence[int]) -> None:
        """Asks ranks to record. Ranks that do not answer in time begin later."""
        requests, pace = {}, max(1.0, len(self.region) / PROMPT)
        for rank in ranks:
            begin = BeginRecording(self._number, self._uid, rank, pace)
            requests[rank] = request(self._runtime, self._procs.address(rank), verbs.RECORD, begin)
            when_done(requests[rank], self._compare(rank, time.time()))
        self._requests = requests

    def wait(self) -> Self:
        """Waits until all ranks record, but only for a short time."""
        _, silent = sort_answers(self._requests)
        self._note(silent, "nothing was recorded of it until it answered")
        return self

    def _compare(self, rank: int, sent_at: float) -> "Callable[[Future[Began]], None]":
        clocks = self._ahead  # so that the callback does not keep the timeline alive

        def compare(answered: "Future[Began]") -> None:
            middle = (sent_at + time.time()) / 2
            if answered.exception(0) is None and abs(ahead := answered.get(0).at - middle) > CLOCKS_S:
                clocks[rank] = ahead

        return compare

    def stop(self) -> Self:
        """Ends the recording, and fetches the unsent records of ranks. Blocks a moment. A second call does nothing."""
        with self._lock:
            if self.ended:
                return self
            self.ended = time.time()
        self._unfollow()
        requests = {}
        for rank in self.region.ranks():
            stop = StopRecording(self._number, self._uid, rank)
            with suppress(TransportError):
                requests[rank] = request(self._runtime, self._procs.address(rank), verbs.END_RECORD, stop)
        try:
            answers, silent = sort_answers(requests)
            for recorded in answers.values():
                self._add(recorded)
            if not self._procs.stopped:
                self._note(silent, "what it sent before is here")
        finally:
            self._service.end_timeline(self._number)
        return self

    def _note(self, silent: dict[int, str], remark: str) -> None:
        reasons: dict[str, list[int]] = {}
        for rank, reason in silent.items():
            reasons.setdefault(first_line(reason), []).append(rank)
        self.notes += [f"{self.name} {self.where(ranks)}: {reason}; {remark}" for reason, ranks in reasons.items()]

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- incoming messages: any thread ---------------------------------------------------------------------------------

    def _add(self, recorded: Recorded) -> bool:
        with self._lock:
            self._rows.add(recorded, self._ahead.get(recorded.rank, 0.0))
            if recorded.rank < 0:  # of this process
                uids = {self._procs.uid, *self._procs.actors} if not self._uid else {self._uid}
                self._rows.add_calls(call for call in recorded.sent if call.mesh in uids)
            self.changes += 1
        return True

    def _on_event(self, event: Event) -> None:
        match event:
            case RankStateChanged(uid, rank, condition) if condition in _TURNS and self._is_ours(uid):
                with self._lock:
                    self._rows.turn(rank, _TURNS[condition], event.detail, event.at)
                    self.changes += 1
                if condition == "alive" and rank in self._rows.spans and not self.ended:
                    self._runtime.later(0.0, lambda: self._begin((rank,)))
            case MeshFailed(_, uid, ranks, record) if self._is_ours(uid):
                with self._lock:
                    for rank in ranks:
                        self._rows.turn(
                            rank, "lost", str(record.get("ended_by") or record.get("title", "")), record["at"]
                        )
                    self.changes += 1
            case SessionOpened(session, uid, rank) if self._is_ours(uid):
                line = line_text(str(event.record.get("file", "")), int(str(event.record.get("line") or 0)))
                with self._lock:
                    self._sessions[session] = rank
                    self._rows.turn(rank, "paused", f"breakpoint {line}".rstrip(), event.since)
                    self.changes += 1
            case SessionClosed(session, closed_at):
                with self._lock:
                    if (paused_rank := self._sessions.pop(session, None)) is not None:
                        self._rows.turn(paused_rank, "", "", closed_at)
                        self.changes += 1
            case _:
                return

    def _is_ours(self, uid: str) -> bool:
        return uid == self._procs.uid or (uid == self._uid if self._uid else uid in self._procs.actors)

    # -- contents ------------------------------------------------------------------------------------------------------

    @property
    def procs(self) -> str:
        """The uid of the processes that are recorded."""
        return self._procs.uid

    @property
    def now(self) -> float:
        """The end of the recording: the time of `stop`, or now."""
        return self.ended or time.time()

    @property
    def seconds(self) -> float:
        """The length of the recording."""
        return self.now - self.began

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls that were sent from here to the mesh, by their beginning."""
        if not self.ended:
            self._service.refresh_timeline(self._number)
        with self._lock:
            return sorted(self._rows.calls.values(), key=lambda call: call.began)

    def spans(self, rank: int) -> list[RecordedSpan]:
        """Returns the spans of a rank (row-major in the whole mesh, also of a slice), by their beginning."""
        with self._lock:
            return self._rows.of(rank, self.now)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of ranks with the same activity at the same time, the largest first."""
        return [row.ranks for row in self.folded(self.began, self.now)]

    def folded(self, begin: float, end: float, *, groups: int = MOST_GROUPS, most: int = 200) -> list[GroupRow]:
        """Returns the rows of a picture of some time (wall clock): groups of ranks, each with the spans of one rank."""
        with self._lock:
            return self._rows.folded(begin, end, groups=groups, most=most)

    def ends(self, calls: Iterable[str]) -> dict[str, CallEnds]:
        """Returns beginnings and durations of some calls on their ranks, by the call's id."""
        with self._lock:
            return self._rows.ends(calls, self.now)

    @property
    def cost(self) -> float:
        """The largest share of a processor's time that recording took in any process: 0.01 is one percent."""
        return max(self._rows.cost.values(), default=0.0) / max(self.seconds, 1.0)

    def where(self, ranks: Sequence[int]) -> str:
        """Returns ranks by their coordinates in the whole mesh, as in `gpus=0-6`."""
        return places_of(self._mesh_region, ranks) or "it"

    def save(self, path: "str | os.PathLike[str]") -> Path:
        """Writes the timeline to a file: `.json` or `.json.gz`, a Chrome trace that https://ui.perfetto.dev opens.

        Raises ValueError for another ending, OSError if the file cannot be written.
        """
        target = Path(path)
        if not target.name.endswith((".json", ".json.gz")):
            raise ValueError(f"{target.name}: timelines are written as .json or .json.gz, for https://ui.perfetto.dev")
        with self._lock:
            document = chrome_trace(self._rows, lambda rank: f"{self.name} {self.where([rank])}", self.now)
        text = json.dumps(document, separators=(",", ":")).encode()
        target.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
        return target

    # -- as text -------------------------------------------------------------------------------------------------------

    def heading(self, groups: int) -> list[str]:
        """Returns a few facts as words, beside the number of groups of ranks that are shown."""
        calls = len(self._rows.calls)
        facts = [f"{self.seconds:.1f} s", counted(len(self._rows.spans), "rank"), counted(calls, "call")]
        if groups > 1:
            facts.append(f"{groups} groups")
        return [*facts, *([] if self.ended else ["recording"])]

    def warnings(self) -> list[str]:
        """Returns limits of the data that a reader must know: missing ranks, and spans that were left out."""
        dropped = self._rows.dropped
        return [*self.notes, *([f"the oldest {counted(dropped, 'span')} are left out"] if dropped else [])]

    def marks(self) -> list[tuple[float, int, RecordedSpan]]:
        """Returns breakpoints, losses and heals by time: seconds since the beginning, the rank, and the span."""
        with self._lock:
            marks = [
                (span.began - self.began, rank, span)
                for rank in self._rows.spans
                for span in self._rows.of(rank, self.now)
                if span.kind in ODD
            ]
        return sorted(marks, key=lambda mark: mark[:2])

    def text(self, name: Callable[[str], str] = os.path.basename) -> str:
        """Returns the timeline as text, with display names of files from `name`."""
        calls, rows = self.calls, self.folded(self.began, self.now)
        facts = ", ".join(self.heading(len(rows)))
        lines = [f"timeline of {self.name}: {facts}", *(f"! {note}" for note in self.warnings())]
        by_title: dict[tuple[str, str], list[float]] = {}
        for call in calls:
            key = (call.title, line_text(call.file, call.line, name))
            by_title.setdefault(key, []).append((call.ended or self.now) - call.began)
        for (title, line), seconds in list(by_title.items())[:_CALLS]:
            usual = f"{_duration(median(seconds))}" + (
                f", at most {_duration(max(seconds))}" if len(seconds) > 1 else ""
            )
            lines.append(f"  {title}{f' ×{len(seconds)}' if len(seconds) > 1 else ''}  {line}  {usual}")
        lines += [f"{self.where(row.ranks)}  {self._shares(row)}".rstrip() for row in rows]
        for moment, rank, span in self.marks()[:_MARKS]:
            lasted = "" if not span.ended else f", for {_duration(span.ended - span.began)}"
            lines.append(f"  {moment:.1f} s  {self.where([rank])} {span.kind}: {span.name}{lasted}")
        return "\n".join(lines)

    def _shares(self, row: GroupRow) -> str:
        spent: dict[str, float] = {}
        counts: dict[str, int] = {}
        for span in row.spans:
            if span.kind == "call":
                spent[span.name] = spent.get(span.name, 0.0) + span.ended - span.began
                counts[span.name] = counts.get(span.name, 0) + span.count
        most = sorted(spent.items(), key=lambda item: -item[1])[:4]
        return "  ".join(
            f"{seconds / max(self.seconds, 1e-6):.0%} {name}{f' ×{counts[name]}' if counts[name] > 1 else ''}"
            for name, seconds in most
        )

    def __repr__(self) -> str:
        return self.text()


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def timeline(mesh: AnyMesh | MeshTrait) -> Timeline:
    """Records what every rank of a mesh, or slice, does from now on: calls, spans, collectives, transfers, pauses.

    Use the result in `with`, or end it with `stop()`. Breakpoints, losses and heals are included, and healed ranks are
    recorded again. Recording takes less than 1 % of a process; memory has a limit, beyond which the oldest spans are
    left out. A mesh of actors has a row for each; a mesh of processes for all actors on it.

    Raises RuntimeError for a stopped mesh, TypeError for a value that is not a mesh.
    """
    part = part_of_mesh(mesh, "recorded")
    state: Any = state_of(part)
    if state.stopped is not None:
        raise RuntimeError(f"{state.name} was stopped ({state.stopped}): there is nothing to record; spawn it again")
    return Timeline(part, current_runtime())


def chrome_trace(rows: TimelineRows, label: Callable[[int], str], now: float) -> TraceEvent:
    """Returns the trace: a process for each rank, one for the sender of calls, an arrow from each call to its ranks.

    Times are microseconds since the first event.
    """
    first = [span.began for rank in rows.spans for span in rows.of(rank, now)[:1]]
    zero = min((*first, *(call.began for call in rows.calls.values())), default=now)
    numbers = {call.call: n for n, call in enumerate(sorted(rows.calls.values(), key=lambda call: call.began))}
    events = [*_traced_caller(rows, numbers, zero, now)]
    for rank in rows.spans:
        events += _traced_rank(rows, numbers, rank, label(rank), zero, now)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(1e9 * zero), "traceEvents": events}


def _process_named(pid: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _traced_caller(rows: TimelineRows, numbers: Mapping[str, int], zero: float, now: float) -> Iterator[TraceEvent]:
    yield from _process_named(CALLER, "controller")
    lanes: list[float] = []  # overlapping calls are in different lanes
    for number, call in ((number, rows.calls[call]) for call, number in numbers.items()):
        lane = next((lane for lane, until in enumerate(lanes) if until <= call.began), len(lanes))
        lanes[lane : lane + 1] = [call.ended or now]
        span = {"pid": CALLER, "tid": lane, "ts": _micros(call.began - zero), "cat": "call"}
        facts = {"ranks": call.size, "source": f"{call.file}:{call.line}", "call": call.call}
        duration = _micros((call.ended or now) - call.began)
        yield {**span, "ph": "X", "name": call.title, "dur": duration, "args": facts}
        yield {**span, "ph": "s", "name": call.title, "id": number}


def _traced_rank(
    rows: TimelineRows, numbers: Mapping[str, int], rank: int, label: str, zero: float, now: float
) -> Iterator[TraceEvent]:
    pid = rank + 1
    yield from _process_named(pid, label)
    used = set()
    for span in rows.of(rank, now):
        lane = _TRACE_LANES.get(span.kind, 0)
        used.add(lane)
        common = {"pid": pid, "tid": lane, "ts": _micros(span.began - zero), "cat": span.kind}
        yield {**common, **_traced_shape(span), "name": span.name, "args": _traced_facts(span)}
        if span.call in numbers:
            name = rows.calls[span.call].title
            yield {**common, "ph": "f", "bp": "e", "name": name, "cat": "call", "id": numbers[span.call]}
    for lane in sorted(used):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": _TRACE_LANE_NAMES[lane]}}


def _traced_shape(span: RecordedSpan) -> TraceEvent:
    if span.ended <= span.began:
        return {"ph": "i", "s": "p" if span.kind in ODD else "t"}
    colour = "terrible" if span.failed else _TRACE_COLOURS.get(span.kind)
    return {"ph": "X", "dur": _micros(span.ended - span.began), **({"cname": colour} if colour else {})}


def _traced_facts(span: RecordedSpan) -> TraceEvent:
    facts: TraceEvent = {"kind": span.kind}
    if span.call:
        facts["call"] = span.call
    if span.count > 1:
        facts["count"] = span.count
    if span.failed:
        facts["failed"] = True
    return facts
