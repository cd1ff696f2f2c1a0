"""Resource usage of processes over the last hour, as curves: `%history NAME`, and a section of the panel."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, state_of
from monarch_nb.profiling import Timeline
from monarch_nb.runtime import ActorState, ProcState, current_runtime
from monarch_nb.store.history import UsagePart, UsageSample
from monarch_nb.telemetry import History
from monarch_nb.telemetry.histories import HEAD, Measure

from ..display.html import framed, heading, table
from ..jupyter import line_magic_of
from ..session import Session
from .bundle import bundled
from .channel import Message
from .live import LiveView, Shown, Watch
from .timelines import TIMELINES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

AGAIN_S = 5.0  # between two messages: processes report about as often
SINGLE = 8  # ranks with a curve each; of more, the highest, the mean and the lowest are drawn
PARTS = 120  # of the time, at most, of such curves
COST = 0.03  # of the time: where gathering takes longer, it is done less often


def with_usage(shell: "InteractiveShell", session: Session) -> Any:
    """IPython's %history, which shows the usage of a mesh if its line is the name of one."""
    before = line_magic_of(shell, "history")

    def run(line: str = "") -> object:
        name = line.strip()
        return History(session.find(name)) if name in session.names() else before(line)

    run.__doc__ = f"""{before.__doc__}

With the name of a mesh, show what its processes have used over the last hour: CPU, memory, GPU, bytes in and out.

    %history trainers

A click on a peak shows the timeline at that moment, where one was recorded. From Python:
monarch.telemetry.history(trainers).
"""
    return run


def history_html(history: History) -> str:
    """Returns the static form."""
    rows = history.rows()
    if not rows:
        return framed(heading(f"History of {history.name}"), '<div class="mnb-s">no samples yet</div>')
    return framed(heading(f"History of {history.name}"), table(HEAD, rows, mono=(5,)))


def curves(history: History) -> Message:
    """Returns the data for a front end."""
    now = time.time()
    parts, ranks = history.parts, history.ranks
    samples = history.samples if len(ranks) <= SINGLE else {}
    measures = []
    for measure in history.measured(parts):
        peak = history.peak(measure.field, parts)
        timeline = next((candidate for candidate in TIMELINES.all if _covers(candidate, history, peak.at)), None)
        when = time.strftime("%H:%M:%S", time.localtime(peak.at))
        measures.append(
            {
                "name": measure.title,
                "lines": _lines(history, measure, samples, now) if samples else common_lines(measure, parts, now),
                "peak": f"{measure.text(peak.value)} · {history.where(peak.rank)} · {when}",
                "at": peak.at,
                "timeline": "" if timeline is None else timeline.key,
            }
        )
    return {"name": history.name, "ranks": len(ranks), "measures": measures}


def _covers(timeline: Timeline, history: History, moment: float) -> bool:
    return bool(timeline.procs == history.procs and timeline.began <= moment <= timeline.now)


def _lines(
    history: History, measure: Measure, samples: dict[int, list[UsageSample]], now: float
) -> list[dict[str, object]]:
    return [
        {
            "label": history.where(rank),
            "points": [(_minutes(sample.at, now), getattr(sample, measure.field) / measure.unit) for sample in series],
        }
        for rank, series in samples.items()
    ]


def common_lines(measure: Measure, parts: Sequence[UsagePart], now: float) -> list[dict[str, object]]:
    """Returns the highest, the mean and the lowest of many ranks; combines adjacent times if there are many."""
    index = measure.place
    count = -(-len(parts) // PARTS)
    drawn = [parts[begin : begin + count] for begin in range(0, len(parts), count)]
    kinds: dict[str, Callable[[Sequence[UsagePart]], float]] = {
        "highest": lambda some: max(part.high[index] for part in some),
        "mean": lambda some: sum(part.mean[index] for part in some) / len(some),
        "lowest": lambda some: min(part.low[index] for part in some),
    }
    return [
        {"label": label, "points": [(_minutes(some[-1].at, now), kind(some) / measure.unit) for some in drawn]}
        for label, kind in kinds.items()
    ]


def _minutes(moment: float, now: float) -> float:
    return round((moment - now) / 60, 3)


def _feed(watch: Watch) -> Callable[[], None]:
    state = watch.runtime.meshes.get(str(watch.message.get("mesh")))
    if state is None:
        raise LookupError(f"there is no mesh {watch.message.get('mesh')!r}")
    mesh: AnyMesh
    if isinstance(state, ActorState):
        mesh = ActorMesh(state, state.region)
    else:
        mesh = ProcMesh(cast(ProcState, state), state.region)
    history, closed = History(mesh), threading.Event()

    def publish() -> None:
        while not closed.is_set() and current_runtime() is watch.runtime:
            began = time.thread_time()
            watch.publish(**curves(history))
            closed.wait(max(AGAIN_S, (time.thread_time() - began) / COST))

    threading.Thread(target=publish, name="monarch-history-view", daemon=True).start()
    return closed.set


def _shown(history: History) -> Shown:
    state = state_of(history.mesh)
    return Shown({"mesh": state.uid, "shown": curves(history)}, state.uid)


HISTORY = LiveView(name="history", **bundled("history"), feed=_feed, shows={History: _shown})
