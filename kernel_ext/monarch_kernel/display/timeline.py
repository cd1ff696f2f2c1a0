"""A timeline as a picture: time from left to right, a row for the calls of the sender and one for each group."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from monarch_nb.wire import counted

from ..jupyter import cell_name, formatters
from .html import folded, framed, heading

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_nb.profiling import Timeline
    from monarch_nb.profiling.rows import CallEnds
    from monarch_nb.profiling.verbs import RecordedCall, RecordedSpan

TIMELINE = "monarch_nb.profiling.timelines.Timeline"  # named, not imported: it is loaded when it is used
FileName = Callable[[str], str]
WIDTH, LABELS = 900, 150  # px of the picture, and of the column of names
_BAR, _STRIP, _GAP, _AXIS = 16, 6, 5, 20
_LANES = 3  # of calls that overlap
_STATIC_GROUPS, _STATIC_SPANS = 16, 120
_LETTER = 6.3  # px of a letter, about
# Translucent under text in the page's own colour, so that they are right in light and dark pages.
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#8a63d2")
_STATES = {"lost": ("#d5341a", "✕"), "healing": ("#e69f00", "↻"), "paused": ("#a463c4", "❚❚")}
_STRIPS = {"span": "span", "transfer": "transfer", "pause": "pause"}
STYLE = """
.mnb-tl{display:block;max-width:100%;height:auto;font:11px var(--jp-ui-font-family,system-ui,sans-serif)}
.mnb-tl text{fill:currentColor;dominant-baseline:central;pointer-events:none}
.mnb-tl .ax{stroke:currentColor;stroke-opacity:.14}.mnb-tl .dim{opacity:.68}
.mnb-tl .ln{stroke:currentColor;stroke-opacity:.22}
.mnb-tl .b rect{stroke-width:1;vector-effect:non-scaling-stroke}
.mnb-tl .b{cursor:pointer}.mnb-tl .b:hover rect{stroke:currentColor}
.mnb-tl .tick{stroke:currentColor;stroke-width:1.5;stroke-opacity:.75}
""".replace("\n", "")


def timeline_html(timeline: "Timeline", name: FileName) -> str:
    """Returns the static form, with files as `name` calls them."""
    notes = "".join(f'<div class="mnb-n">! {escape(note)}</div>' for note in timeline.warnings())
    picture = timeline_svg(timeline, name, 0.0, timeline.seconds, groups=_STATIC_GROUPS, most=_STATIC_SPANS)
    return framed(
        heading(f"Timeline of {timeline.name}", *picture.facts),
        notes,
        picture.svg,
        folded("as text", timeline.text(name)),
        kind="mnb-y",
    )


@dataclass(frozen=True)
class _Box:
    """A box in a row."""

    begin: float  # seconds since the beginning of the timeline
    end: float
    name: str
    about: str
    call: str = ""
    kind: str = "call"
    failed: bool = False


class DrawnTimeline(NamedTuple):
    """A picture, and the facts for its heading."""

    svg: str
    facts: list[str]


def timeline_svg(
    timeline: "Timeline",
    name: FileName,
    begin: float,
    end: float,
    *,
    groups: int = 40,
    most: int = 200,
    width: int = WIDTH,
) -> DrawnTimeline:
    """Returns a picture of the seconds from `begin` to `end`, with at most so many groups. `width` is in px."""
    zero, end, now = timeline.began, max(end, begin + 1e-6), timeline.now
    calls = [call for call in timeline.calls if call.began - zero <= end and (call.ended or now) - zero >= begin]
    rows = timeline.folded(zero + begin, zero + end, groups=groups, most=most)
    ends = timeline.ends(call.call for call in calls[-most:])
    picture = _Picture(begin, end, width)
    caller = [_call_bar(timeline, call, ends.get(call.call), name) for call in calls]
    picture.row("calls", "calls as they were sent and answered", _thinned(caller, (end - begin) / most / 2))
    for row in rows:
        label = timeline.where(row.ranks)
        count = len(row.ranks)
        about = f"{label}: {counted(count, 'rank')}" + (
            f", shown is {timeline.where([row.shown])}" if count > 1 else ""
        )
        picture.row(label, about, [_bar(span, zero) for span in row.spans], count)
    left_out = len(timeline.region) - sum(len(row.ranks) for row in rows)
    if left_out:
        picture.note(f"{counted(left_out, 'rank')} of smaller groups are left out")
    facts = timeline.heading(len(rows))
    return DrawnTimeline(picture.svg(f"timeline of {timeline.name}, {', '.join(facts)}"), facts)


def _bar(span: "RecordedSpan", zero: float) -> _Box:
    seconds = span.ended - span.began
    count = f" ×{span.count}" if span.count > 1 else ""
    facts = [f"{span.name}{count}", "" if span.kind == "call" else span.kind, duration(seconds) if seconds else ""]
    facts += [f"at {span.began - zero:.3f} s", "failed" if span.failed else ""]
    about = " · ".join(filter(None, facts))
    return _Box(span.began - zero, span.ended - zero, span.name + count, about, span.call, span.kind, span.failed)


def _call_bar(timeline: "Timeline", call: "RecordedCall", ends: "CallEnds | None", name: FileName) -> _Box:
    """Returns a call as its sender saw it; the text has its times on the ranks."""
    zero, until = timeline.began, call.ended or timeline.now
    facts = [
        call.title,
        f"{name(call.file)}:{call.line}",
        counted(call.size, "rank"),
        f"sent at {call.began - zero:.3f} s",
    ]
    facts.append(f"answered after {duration(until - call.began)}" if call.ended else "not answered yet")
    if ends is not None:
        first, last = ends.first - call.began, ends.last - call.began
        facts.append(f"ranks began {_range_text(first, last)} later")
        facts.append(f"ran {_range_text(ends.least, ends.most)}")
        if ends.ranks > 1 and ends.most > 1.05 * ends.least:
            facts.append(f"longest on {timeline.where([ends.slowest])}")
        if ends.ranks < call.size:
            facts.append(f"{counted(call.size - ends.ranks, 'rank')} not seen")
    return _Box(call.began - zero, until - zero, call.title.rpartition(".")[2], " · ".join(facts), call.call)


def duration(seconds: float) -> str:
    """Returns a duration in three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * max(seconds, 0.0):.2f} ms"


def _range_text(least: float, most: float) -> str:
    low, high = duration(least), duration(most)
    return low if low == high else f"{low} to {high}"


def _thinned(bars: Sequence[_Box], gap: float) -> list[_Box]:
    """Returns the bars, with each run of calls that are too short to be seen as one bar."""
    thinned: list[_Box] = []
    count = 1
    for bar in bars:
        last = thinned[-1] if thinned else None
        if (
            last is not None
            and bar.end - bar.begin < gap
            and bar.begin - last.end < gap
            and bar.name == last.name.split(" ×")[0]
        ):
            count += 1
            name = f"{bar.name} ×{count}"
            about = f"{name} · {duration(bar.end - last.begin)} · at {last.begin:.3f} s"
            thinned[-1] = _Box(last.begin, max(last.end, bar.end), name, about)
        else:
            thinned.append(bar)
            count = 1
    return thinned


class _Picture:
    """Rows of bars on a common axis of time, as SVG."""

    def __init__(self, begin: float, end: float, width: int) -> None:
        self._width = width
        self._labels = min(LABELS, width // 4)
        self._begin, self._scale = begin, (width - self._labels - 8) / (end - begin)
        self._end = end
        self._y = float(_AXIS)
        self._parts: list[str] = []
        self._colours: dict[str, str] = {}

    def _x(self, seconds: float) -> float:
        return self._labels + (min(max(seconds, self._begin), self._end) - self._begin) * self._scale

    def _middle(self, seconds: float, text: str) -> float:
        """Returns the middle of the label of a time; the last label on the axis is not cut off."""
        return min(self._x(seconds), self._width - len(text) * _LETTER / 2)

    def row(self, label: str, about: str, bars: Sequence[_Box], count: int = 1) -> None:
        """Adds a row with its name."""
        top = self._y + _GAP / 2
        lanes: list[float] = []
        drawn: list[str] = []
        strips = any(bar.kind in _STRIPS or bar.kind == "collective" for bar in bars)
        for bar in bars:
            if bar.kind in _STATES or bar.kind in _STRIPS or bar.kind == "collective":
                continue
            lane = next((index for index, until in enumerate(lanes) if until <= bar.begin + 1e-9), len(lanes))
            lane = min(lane, _LANES - 1)
            lanes[lane : lane + 1] = [bar.end]
            drawn.append(self._box(bar, top + lane * _BAR, _BAR - 2, self._colour(bar.name)))
        height = max(1, len(lanes)) * _BAR
        for bar in bars:
            if bar.kind == "collective":
                drawn.append(self._tick(bar, top + height))
            elif bar.kind in _STRIPS:
                drawn.append(self._box(bar, top + height, _STRIP, self._colour(bar.name), text=False))
            elif bar.kind in _STATES:
                drawn.append(self._box(bar, top, height - 2, _STATES[bar.kind][0], sign=_STATES[bar.kind][1]))
        height += _STRIP + 2 if strips else 0
        number = f"{count}×" if count > 1 else ""
        shown = _cut(label or "one rank", self._labels - (14 + _LETTER * len(number)))
        self._parts.append(
            f'<g class="r"><text x="0" y="{_n(top + _BAR / 2)}">{escape(shown)}</text>'
            f'<text class="dim" x="{self._labels - 8}" y="{_n(top + _BAR / 2)}" text-anchor="end">{number}</text>'
            f"<title>{escape(about)}</title>{''.join(drawn)}</g>"
        )
        self._y = top + height + _GAP / 2
        self._parts.append(f'<path class="ln" d="M0 {_n(self._y)}H{self._width}"/>')

    def note(self, text: str) -> None:
        """Adds a line of text."""
        self._parts.append(f'<text class="dim" x="0" y="{_n(self._y + 10)}">{escape(text)}</text>')
        self._y += 20

    def _colour(self, name: str) -> str:
        name = name.partition(" ×")[0]
        return self._colours.setdefault(name, _PALETTE[len(self._colours) % len(_PALETTE)])

    def _box(self, bar: _Box, y: float, height: float, colour: str, *, text: bool = True, sign: str = "") -> str:
        x = self._x(bar.begin)
        width = max(self._x(bar.end) - x, 1.0)
        sign = "✕" if bar.failed else sign
        shown = _cut(f"{sign} {bar.name}".strip(), width - 6) if text else ""
        edge = "#d5341a" if bar.failed else colour
        title = escape(bar.about)
        words = f'<text x="{_n(x + 3)}" y="{_n(y + height / 2)}">{escape(shown)}</text>' if shown else ""
        call = f' data-c="{escape(bar.call)}"' if bar.call else ""
        return (
            f'<g class="b" data-n="{escape(bar.name)}"{call}><rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
            f'height="{_n(height)}" rx="{2 if width > 4 else 0}" fill="{colour}" fill-opacity=".38" stroke="{edge}"/>'
            f"{words}<title>{title}</title></g>"
        )

    def _tick(self, bar: _Box, y: float) -> str:
        x = self._x(bar.begin)
        return (
            f'<g class="b" data-n="{escape(bar.name)}"><path class="tick" d="M{_n(x)} {_n(y)}v{_STRIP}"/>'
            f"<title>{escape(bar.about)}</title></g>"
        )

    def svg(self, label: str) -> str:
        """Returns the whole picture."""
        height = _n(self._y + 4)
        axis = "".join(
            f'<path class="ax" d="M{_n(self._x(seconds))} {_AXIS - 4}V{height}"/>'
            f'<text class="dim" x="{_n(self._middle(seconds, text))}" y="8" text-anchor="middle">{text}</text>'
            for seconds, text in ticks(self._begin, self._end, (self._width - self._labels) / 90)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mnb-tl" width="{self._width}" height="{height}" '
            f'viewBox="0 0 {self._width} {height}" role="img" aria-label="{escape(label)}"><style>{STYLE}</style>'
            f"{axis}{''.join(self._parts)}</svg>"
        )


def ticks(begin: float, end: float, most: float = 8) -> Iterator[tuple[float, str]]:
    """About `most` round times at most for an axis, with their texts."""
    rough = (end - begin) / max(most, 2)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for number in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1):
        yield number * step, f"{number * step:.{digits}f} s"


def _cut(text: str, width: float) -> str:
    """Returns the part of a text that fits into a width; "" if hardly any of it does."""
    most = int(width / _LETTER)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…" if most > 2 else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class TimelineForms:
    """Displays of timelines in one kernel, with its cells' numbers as file names."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._formatters = formatters(shell)

    def install(self) -> None:
        """Timelines are shown like this from now on."""
        self._formatters["text/html"].for_type(TIMELINE, lambda timeline: timeline_html(timeline, self._named))
        self._formatters["text/plain"].for_type(TIMELINE, lambda timeline, out, _: out.text(timeline.text(self._named)))

    def uninstall(self) -> None:
        """Removes the displays."""
        for kind in ("text/html", "text/plain"):
            self._formatters[kind].pop(TIMELINE, None)

    def _named(self, file: str) -> str:
        return cell_name(self._shell, file) or os.path.basename(file)
