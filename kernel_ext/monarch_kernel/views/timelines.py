"""Timelines of this kernel: live in cells, and in a section of the panel."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from monarch_nb import profiling
from monarch_nb.debug.render import FileName
from monarch_nb.mesh import AnyMesh, region_of, state_of

from ..display.timeline import TIMELINE, WIDTH, timeline_svg
from .channel import Message
from .live import LiveView, Shown, Watch, bundled

if TYPE_CHECKING:
    from monarch_nb.profiling import Timeline

KEPT = 4
FOLLOWED_S = 30.0  # shown of a long timeline while it is recorded
AGAIN_S = 1.0  # between two pictures of a running timeline
COST = 0.01  # of the time, by all front ends together: pictures that take longer come less often
GROUPS = 24  # in a picture of a running timeline
LEAST_WIDTH, MOST_WIDTH = 240, 4000
_SAVED_GROUPS, _SAVED_SPANS = 12, 60


class Timelines:
    """Timelines that magics and the panel have begun. The oldest are stopped and removed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timelines: list[Timeline] = []
        self._added = threading.Event()  # replaced with each new one
        self._feeds = 0  # front ends that watch a timeline

    @property
    def all(self) -> "list[Timeline]":
        """All of them, the newest first."""
        with self._lock:
            return list(self._timelines)

    def get(self, key: str) -> "Timeline | None":
        """Returns the timeline with this key; the newest for ""."""
        return next((timeline for timeline in self.all if key in ("", timeline.key)), None)

    def of(self, part: AnyMesh) -> "Timeline":
        """Returns the running timeline of these ranks, or else a new one."""
        name, region = state_of(part).name, region_of(part)
        for timeline in self.all:
            if not timeline.ended and (timeline.name, timeline.region) == (name, region):
                return timeline
        return self.add(profiling.timeline(part))

    def add(self, timeline: "Timeline") -> "Timeline":
        """Adds a timeline, and returns it."""
        with self._lock:
            if timeline not in self._timelines:
                self._timelines.insert(0, timeline)
            old = self._timelines[KEPT:]
            del self._timelines[KEPT:]
            added, self._added = self._added, threading.Event()
        added.set()
        for entry in old:
            threading.Thread(target=entry.stop, name="monarch-timeline-end", daemon=True).start()
        return timeline

    def feed(self, watch: Watch) -> Callable[[], None]:
        """Publishes pictures of one to a front end until the result is called."""
        closed = threading.Event()
        threading.Thread(target=self._publish, args=(watch, closed), name="monarch-timeline-view", daemon=True).start()
        return closed.set

    def _publish(self, watch: Watch, closed: threading.Event) -> None:
        with self._lock:
            self._feeds += 1
        try:
            self._follow(watch, closed)
        finally:
            with self._lock:
                self._feeds -= 1

    def _follow(self, watch: Watch, closed: threading.Event) -> None:
        last: tuple[object, ...] = ()
        while not closed.is_set():
            pause, shown = AGAIN_S, self.get(str(watch.message.get("key") or ""))
            if shown is not None:
                now = (shown.key, shown.changes, shown.ended, shown.ended or round(shown.seconds))
                if now != last:
                    began = time.thread_time()
                    watch.publish(**picture(shown, watch.message, watch.file_name))
                    last = now
                    pause = max(AGAIN_S, self._feeds * (time.thread_time() - began) / COST)
            elif not last:
                last = (None,)
                watch.publish(svg="")
            closed.wait(pause)


TIMELINES = Timelines()


def picture(timeline: "Timeline", message: Message, name: FileName) -> Message:
    """Returns the picture for a front end: of the requested seconds, of all, or of the last while a long one runs."""
    seconds = timeline.seconds
    begin, end = _number(message.get("begin")), _number(message.get("end"))
    if begin is None and end is None and not timeline.ended:
        begin = max(0.0, seconds - FOLLOWED_S)
    begin, end = max(0.0, begin or 0.0), min(seconds, end if end is not None else seconds)
    width = min(MOST_WIDTH, max(LEAST_WIDTH, int(_number(message.get("width")) or WIDTH)))
    most = max(40, width // 4)
    drawn = timeline_svg(timeline, name, begin, end, groups=GROUPS, most=most, width=width)
    return {
        "key": timeline.key,
        "name": timeline.name,
        "facts": drawn.facts,
        "notes": timeline.warnings(),
        "recording": not timeline.ended,
        "began": timeline.began,
        "seconds": seconds,
        "begin": begin,
        "end": max(end, begin),
        "svg": drawn.svg,
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def order(message: Message, part: Callable[[], AnyMesh]) -> Message:
    """Carries out a request of a front end: to begin one of `part()`, to stop one, or to save it as a file."""
    if message.get("do") == "begin":
        return {"key": TIMELINES.of(part()).key}
    timeline = TIMELINES.get(str(message.get("key") or ""))
    if timeline is None:
        raise LookupError("that timeline is not kept any more: only the last few are")
    if message.get("do") == "stop":
        timeline.stop()
        return {"key": timeline.key, "text": f"the timeline of {timeline.name} is complete"}
    target = timeline.save(f"{_plain(timeline.name)}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    return {"key": timeline.key, "text": f"wrote {target}: open it at https://ui.perfetto.dev"}


def _plain(name: Iterable[str]) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _shown(timeline: "Timeline") -> Shown:
    TIMELINES.add(timeline)  # those of `with monarch.timeline(…)` too
    svg, facts = timeline_svg(timeline, str, 0.0, timeline.seconds, groups=_SAVED_GROUPS, most=_SAVED_SPANS)
    facts = [fact for fact in facts if fact != "recording"]
    options = {"key": timeline.key, "name": timeline.name, "facts": facts, "seconds": timeline.seconds, "svg": svg}
    return Shown(options, timeline.key)


VIEW = LiveView(name="timeline", **bundled("timeline"), feed=TIMELINES.feed, shows={TIMELINE: _shown})
