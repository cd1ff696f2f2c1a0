"""A simulation as a picture: the streams of ranks over time, and their memory."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from monarch_nb.tensor.simulated.timeline import SimulatedTask, SimulatedTimeline, groups, lane_name, ranks_named

from .html import framed, heading

if TYPE_CHECKING:
    from monarch_nb.tensor.simulated.simulator import Simulator

_LEFT, _WIDTH, _ROW, _BAR, _MEMORY = 130, 760, 22, 16, 34
_MOST_GROUPS = 8  # that are drawn
_LEAST = 0.6  # pixels: narrower tasks of one kind are drawn together
_NAMED = 46  # pixels: narrower tasks have no room for their names
_KINDS = {  # translucent, so that they are right on any background
    "operation": ("operations", "rgba(56,139,253,.55)"),
    "exchange": ("exchanges between ranks", "rgba(219,109,40,.6)"),
    "wait": ("waits for another stream", "rgba(128,128,128,.25)"),
}
_TEXT = 'fill="currentColor" font-size="11"'


def simulation_html(simulator: "Simulator") -> str:
    """Returns the static form."""
    timeline, file = simulator.timeline, simulator.trace_file
    rank_groups = groups(timeline)
    facts = (f"{simulator.elapsed:g} µs", f"{timeline.commands} commands", f"at most {_bytes(simulator.peak_memory)}")
    more = len(rank_groups) - _MOST_GROUPS
    notes = [f"{more} more groups of ranks are not drawn"] if more > 0 else []
    if file is not None and file.exists():
        notes.append(f"{file} opens in ui.perfetto.dev")
    return framed(
        heading("Simulation", *facts),
        _picture(timeline, rank_groups[:_MOST_GROUPS]),
        _legend(),
        *(f'<div class="mnb-s">{escape(note)}</div>' for note in notes),
    )


def _picture(timeline: SimulatedTimeline, rank_groups: Sequence[Sequence[int]]) -> str:
    scale = _WIDTH / (timeline.elapsed or 1.0)
    parts, y = [], 4
    for ranks in rank_groups:
        first = ranks[0]
        parts.append(f'<text x="0" y="{y + 12}" font-weight="600" {_TEXT}>{escape(ranks_named(ranks))}</text>')
        y += 18
        for lane, tasks in timeline.tasks[first].items():
            label = escape(lane_name(lane))
            parts.append(f'<text x="8" y="{y + 12}" opacity=".75" {_TEXT}>{label}</text>')
            parts += (_bar(name, kind, start, end, y, scale) for name, kind, start, end in _merged(tasks, scale))
            y += _ROW
        parts.append(_memory(timeline.memory_of(first), y, scale, timeline.elapsed))
        y += _MEMORY + 10
    for quarter in range(5):
        x = _LEFT + _WIDTH * quarter / 4
        anchor = "end" if quarter == 4 else "middle" if quarter else "start"
        when = f"{timeline.elapsed * quarter / 4:g} µs"
        parts.append(f'<text x="{x:.1f}" y="{y + 10}" text-anchor="{anchor}" opacity=".75" {_TEXT}>{when}</text>')
    size = f'viewBox="0 0 {_LEFT + _WIDTH} {y + 16}" style="max-width:{_LEFT + _WIDTH}px;width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg>'


def _merged(tasks: Sequence[SimulatedTask], scale: float) -> Iterator[tuple[str, str, float, float]]:
    """Tasks as they are drawn: runs of one kind that are too narrow are one."""
    run: list[SimulatedTask] = []
    for task in tasks:
        if task.end <= task.start:
            continue
        is_narrow = (task.end - task.start) * scale < _LEAST
        if run and not (is_narrow and run[-1].kind == task.kind and task.start == run[-1].end):
            yield _combined(run)
            run = []
        run.append(task)
        if not is_narrow:
            yield _combined(run)
            run = []
    if run:
        yield _combined(run)


def _combined(run: Sequence[SimulatedTask]) -> tuple[str, str, float, float]:
    name = run[0].name if len(run) == 1 else f"{len(run)} tasks, from {run[0].name} to {run[-1].name}"
    return name, run[0].kind, run[0].start, run[-1].end


def _bar(name: str, kind: str, start: float, end: float, y: int, scale: float) -> str:
    x, width = _LEFT + start * scale, (end - start) * scale
    title = f"<title>{escape(name)}: {start:g}-{end:g} µs</title>"
    fill = _KINDS[kind][1]
    gap = 0.5 if width > 2 else 0
    shown = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width - gap, 0.3):.2f}" height="{_BAR}" fill="{fill}">{title}</rect>'
    )
    if width < _NAMED:
        return shown
    text = escape(name[: int(width / 6.2)])
    return shown + f'<text x="{x + 3:.2f}" y="{y + 12}" pointer-events="none" {_TEXT}>{text}</text>'


def _memory(levels: Sequence[tuple[float, int]], y: int, scale: float, elapsed: float) -> str:
    most = max((bytes_ for _, bytes_ in levels), default=0)
    label = f'<text x="8" y="{y + 12}" opacity=".75" {_TEXT}>memory</text>'
    if not most:
        return label
    points, level = [f"{_LEFT},{y + _MEMORY}"], 0
    for when, bytes_ in [*levels, (elapsed, levels[-1][1])]:
        x = _LEFT + when * scale
        for height in (level, bytes_):
            points.append(f"{x:.2f},{y + _MEMORY * (1 - height / most):.2f}")
        level = bytes_
    points.append(f"{_LEFT + elapsed * scale:.2f},{y + _MEMORY}")
    peak = f'<text x="8" y="{y + 26}" opacity=".75" {_TEXT}>at most {_bytes(most)}</text>'
    return f'{label}{peak}<polygon points="{" ".join(points)}" fill="rgba(46,160,67,.3)"/>'


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _legend() -> str:
    box = "display:inline-block;width:9px;height:9px;border-radius:2px;margin:0 4px 0 0"
    keys = "".join(
        f'<span style="margin-right:12px"><span style="{box};background-color:{fill}"></span>{escape(name)}</span>'
        for name, fill in _KINDS.values()
    )
    return f'<div class="mnb-s">{keys}</div>'
