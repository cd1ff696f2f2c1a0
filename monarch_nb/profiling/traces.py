"""PyTorch's own traces of the ranks of a mesh, as one file: begun and ended on each rank between two messages."""

import gzip
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from monarch_nb.mesh import ActorMesh, AnyMesh, ValueMesh, run_on_each, state_of, values_or_errors
from monarch_nb.profiling.result import Profile
from monarch_nb.runtime import Future
from monarch_nb.wire import text_of

END_S = 60.0  # for the ranks to write their traces and send them
_CALL = "__import__('monarch_nb.profiling.torch_rank', fromlist=['begin']).{call}"
APART = 1000  # numbers of processes for each rank
_FLOWS = frozenset({"s", "t", "f", "b", "n", "e"})  # phases of events that belong together by an id


Trace: TypeAlias = dict[str, Any]  # of JSON, as PyTorch writes it


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank, as PyTorch writes it. `ahead` is how many seconds its host's clock is ahead of ours."""

    rank: int
    label: str
    document: Trace
    ahead: float = 0.0


def timeline(traces: Iterable[RankTrace]) -> Trace:
    """One document: the processes of each rank under its label, in the order of ranks, at the same zero of time.

    PyTorch writes microseconds since `baseTimeNanoseconds` of the host's clock.
    """
    every = sorted(traces, key=lambda trace: trace.rank)
    bases = [_base(trace.document) - 1e6 * trace.ahead for trace in every]
    zero = min(bases, default=0.0)
    events: list[Trace] = []
    for trace, base in zip(every, bases, strict=True):
        events += _moved(trace, base - zero)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(1000 * zero), "traceEvents": events}


def _base(document: Trace) -> float:
    """Microseconds since the epoch that its times count from."""
    return float(document.get("baseTimeNanoseconds", 0)) / 1000


def _moved(trace: RankTrace, later: float) -> list[Trace]:
    processes: dict[object, int] = {}
    moved = []
    for event in trace.document.get("traceEvents", ()):
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue  # every process has a name of ours
        changed = dict(event)
        if "pid" in event:
            changed["pid"] = processes.setdefault(event["pid"], APART * (trace.rank + 1) + len(processes))
        if "ts" in event:
            changed["ts"] = event["ts"] + later
        if "id" in event and event.get("ph") in _FLOWS:
            changed["id"] = f"{trace.rank}.{event['id']}"
        moved.append(changed)
    return [*_names(trace, processes), *moved]


def _names(trace: RankTrace, processes: Mapping[object, int]) -> list[Trace]:
    names: dict[object, str] = {
        event["pid"]: str(event.get("args", {}).get("labels", ""))
        for event in trace.document.get("traceEvents", ())
        if event.get("ph") == "M" and event.get("name") == "process_labels"
    }
    found = []
    for number, (pid, ours) in enumerate(processes.items()):
        what = names.get(pid, "") or ("" if isinstance(pid, int) else str(pid))
        name = f"{trace.label} {what}".rstrip()
        found.append({"ph": "M", "name": "process_name", "pid": ours, "args": {"name": name}})
        order = {"sort_index": APART * trace.rank + number}
        found.append({"ph": "M", "name": "process_sort_index", "pid": ours, "args": order})
    return found


class Traces:
    """The traces of one profile."""

    def __init__(self, mesh: AnyMesh, profile: Profile) -> None:
        self._mesh, self._profile = mesh, profile
        self._number = time.time_ns()

    def begin(self) -> None:
        """PyTorch's profiler runs on all ranks. Blocks until they have ended what they were doing.

        Raises RuntimeError where PyTorch is not installed, or its profiler runs there already.
        """
        every = not isinstance(self._mesh, ActorMesh)
        begun = self._run(f"begin({self._number}, every_thread={every})")
        wrong = {rank: why for rank, (_, why) in _results(begun, None).items() if why}
        if wrong:
            rank, why = next(iter(wrong.items()))
            self._run(f"end({self._number})")
            raise RuntimeError(f"PyTorch's profiler did not begin on {self._named([rank])}: {why}")

    def end(self, folder: str, ahead: Mapping[int, float]) -> None:
        """The traces of all ranks that answer, in one file; the profile's notes say what is missing. `ahead` is by how
        many seconds the clocks of ranks are ahead of this one.
        """
        got = _results(self._run(f"end({self._number})"), END_S)
        traces = []
        for rank, (packed, why) in got.items():
            if why:
                self._profile.notes.append(f"{self._named([rank])} gave no trace: {why}")
            else:
                document = json.loads(gzip.decompress(packed))
                traces.append(RankTrace(rank, self._named([rank]), document, ahead.get(rank, 0.0)))
        if traces:
            self._profile.trace = _written(Path(folder), self._profile.name, timeline(traces))

    def _run(self, call: str) -> "dict[int, Future[ValueMesh[bytes]]]":
        return run_on_each(self._mesh, _CALL.format(call=call), filename="<torch.profiler>")

    def _named(self, ranks: Sequence[int]) -> str:
        return f"{state_of(self._mesh).name} {self._profile.where(ranks)}"


def _results(asked: "dict[int, Future[ValueMesh[bytes]]]", seconds: float | None) -> dict[int, tuple[bytes, str]]:
    """The result of each rank, or the reason why there is none."""
    results: dict[int, tuple[bytes, str]] = {}
    for rank, value in values_or_errors(asked, seconds).items():
        if isinstance(value, TimeoutError):
            results[rank] = b"", f"it was still busy after {seconds:g} s"
        elif isinstance(value, Exception):
            results[rank] = b"", text_of(value).partition("\n")[0]
        else:
            results[rank] = value, ""
    return results


def _written(folder: Path, name: str, document: Trace) -> Path:
    """The file, beside the notebook; written beside its name first, so that no half of one is left."""
    plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
    target = folder / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
    half = target.with_name(f".{target.name}.part")
    with gzip.open(half, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(document, file, separators=(",", ":"))
    half.replace(target)
    return target
