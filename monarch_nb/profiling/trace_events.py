"""Export of a timeline as a Chrome trace, which Perfetto and chrome://tracing open."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from monarch_nb.profiling.rows import ODD, TimelineRows
from monarch_nb.profiling.verbs import RecordedSpan

Event: TypeAlias = dict[str, object]
CALLER = 0  # the process of the file with the calls of their sender; rank n is process n + 1
_LANES = {"call": 0, "span": 1, "transfer": 2, "collective": 2, "pause": 3}
_LANE_NAMES = ("calls", "spans", "collectives, transfers", "pauses")
_COLOURS = {"lost": "terrible", "healing": "bad", "paused": "yellow"}


def chrome_trace(rows: TimelineRows, label: Callable[[int], str], now: float) -> Event:
    """Returns the trace: a process for each rank, one for the sender of calls, an arrow from each call to its ranks.

    Times are microseconds since the first event.
    """
    first = [span.began for rank in rows.spans for span in rows.of(rank, now)[:1]]
    zero = min((*first, *(call.began for call in rows.calls.values())), default=now)
    numbers = {call.call: n for n, call in enumerate(sorted(rows.calls.values(), key=lambda call: call.began))}
    events = [*_caller(rows, numbers, zero, now)]
    for rank in rows.spans:
        events += _rank(rows, numbers, rank, label(rank), zero, now)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(1e9 * zero), "traceEvents": events}


def _named(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _caller(rows: TimelineRows, numbers: Mapping[str, int], zero: float, now: float) -> Iterator[Event]:
    yield from _named(CALLER, "controller")
    lanes: list[float] = []  # overlapping calls are in different lanes
    for number, call in ((number, rows.calls[call]) for call, number in numbers.items()):
        lane = next((lane for lane, until in enumerate(lanes) if until <= call.began), len(lanes))
        lanes[lane : lane + 1] = [call.ended or now]
        span = {"pid": CALLER, "tid": lane, "ts": _micros(call.began - zero), "cat": "call"}
        facts = {"ranks": call.size, "source": f"{call.file}:{call.line}", "call": call.call}
        duration = _micros((call.ended or now) - call.began)
        yield {**span, "ph": "X", "name": call.title, "dur": duration, "args": facts}
        yield {**span, "ph": "s", "name": call.title, "id": number}


def _rank(
    rows: TimelineRows, numbers: Mapping[str, int], rank: int, label: str, zero: float, now: float
) -> Iterator[Event]:
    pid = rank + 1
    yield from _named(pid, label)
    used = set()
    for span in rows.of(rank, now):
        lane = _LANES.get(span.kind, 0)
        used.add(lane)
        common = {"pid": pid, "tid": lane, "ts": _micros(span.began - zero), "cat": span.kind}
        yield {**common, **_shape(span), "name": span.name, "args": _facts(span)}
        if span.call in numbers:
            name = rows.calls[span.call].title
            yield {**common, "ph": "f", "bp": "e", "name": name, "cat": "call", "id": numbers[span.call]}
    for lane in sorted(used):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": _LANE_NAMES[lane]}}


def _shape(span: RecordedSpan) -> Event:
    if span.ended <= span.began:
        return {"ph": "i", "s": "p" if span.kind in ODD else "t"}
    colour = "terrible" if span.failed else _COLOURS.get(span.kind)
    return {"ph": "X", "dur": _micros(span.ended - span.began), **({"cname": colour} if colour else {})}


def _facts(span: RecordedSpan) -> Event:
    facts: Event = {"kind": span.kind}
    if span.call:
        facts["call"] = span.call
    if span.count > 1:
        facts["count"] = span.count
    if span.failed:
        facts["failed"] = True
    return facts
