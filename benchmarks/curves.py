"""Draws the figures of `benchmarks.scale`: `python -m benchmarks.curves build/bench-scale.json FOLDER`.

Three pictures, readable on light and on dark paper: seconds, messages, and memory, each against the number of hosts.
"""

import argparse
import json
import math
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

PANELS = (
    ("join storm", "all hosts join at once"),
    ("spawn processes", "eight processes a host start"),
    ("broadcast", "a cast"),
    ("call, same answers", "cast and gather, one answer"),
    ("call, other answers", "cast and gather, all differ"),
    ("a death told", "a process dies, and a call fails"),
    ("a death healed", "and is healed"),
    ("a rack dies", "32 hosts die at once"),
    ("detach", "the mesh is left"),
    ("re-attach", "and come back to"),
    ("a second of lines", "up to 1,000,000 lines in a second"),
    ("stop", "everything is stopped"),
)
ACROSS = 4
WIDTH, HEIGHT = 218, 150  # of a panel, with its words
LEFT, TOP, RIGHT, BOTTOM = 44, 34, 8, 22  # of the plot within it
INK = "#80878f"  # grey is readable on both


class Line(NamedTuple):
    """One line of a panel."""

    key: str
    name: str
    colour: str
    dash: str = ""


SECONDS = (Line("modelled_s", "modelled time", "#2f81f7"), Line("core_s", "a core of the controller", "#db6d28", "5 3"))
MESSAGES = (Line("sent", "messages out", "#2f81f7"), Line("received", "messages in", "#db6d28", "5 3"))


def picture(runs: list[dict[str, Any]], lines: tuple[Line, ...], low: float, high: float, unit: Any) -> str:
    """All panels with the same axes, so that they can be compared."""
    rows = -(-len(PANELS) // ACROSS)
    legend = "".join(
        f'<path d="M{12 + 190 * index} 14h26" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dash}"/>'
        f'<text x="{44 + 190 * index}" y="18">{line.name}</text>'
        for index, line in enumerate(lines)
    )
    panels = "".join(
        _panel(runs, action, caption, lines, low, high, unit, index % ACROSS * WIDTH, 26 + index // ACROSS * HEIGHT)
        for index, (action, caption) in enumerate(PANELS)
    )
    return _svg(ACROSS * WIDTH, 26 + rows * HEIGHT, legend + panels)


def _panel(runs: list[dict[str, Any]], action: str, caption: str, lines: tuple[Line, ...], low: float, high: float,
           unit: Any, left: int, top: int) -> str:  # fmt: skip
    parts = [
        f'<text x="{left + LEFT}" y="{top + 14}" font-weight="600">{escape(action)}</text>',
        f'<text x="{left + LEFT}" y="{top + 27}" font-size="10">{escape(caption)}</text>',
        _axes(runs, low, high, unit, left, top),
    ]
    for line in lines:
        points = [(run["hosts"], cost[line.key]) for run in runs for cost in run["costs"] if cost["what"] == action]
        drawn = " ".join(f"{_x(runs, hosts, left):.1f},{_y(value, low, high, top):.1f}" for hosts, value in points)
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{line.colour}" stroke-width="1.8" '
            f'stroke-dasharray="{line.dash}"><title>{escape(action)}, {line.name}: '
            f"{', '.join(f'{hosts:,} hosts {unit(value)}' for hosts, value in points)}</title></polyline>"
        )
    return "".join(parts)


def _axes(runs: list[dict[str, Any]], low: float, high: float, unit: Any, left: int, top: int) -> str:
    parts = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = _y(10.0**power, low, high, top)
        parts.append(f'<path d="M{left + LEFT} {y:.1f}H{left + WIDTH - RIGHT}" stroke="{INK}" stroke-opacity=".3"/>')
        if (power - round(math.log10(low))) % 2 == 0:
            parts.append(_small(left + LEFT - 5, y + 3.5, unit(10.0**power), "end"))
    for hosts in (10, 100, 1000, 10_000):
        if runs[0]["hosts"] <= hosts <= runs[-1]["hosts"]:
            x = _x(runs, hosts, left)
            parts.append(_small(x, top + HEIGHT - BOTTOM + 13, f"{hosts:,}"))
    return "".join(parts)


def _x(runs: list[dict[str, Any]], hosts: int, left: int) -> float:
    first, last = math.log10(runs[0]["hosts"]), math.log10(runs[-1]["hosts"])
    share = (math.log10(hosts) - first) / ((last - first) or 1)
    return left + LEFT + 6 + share * (WIDTH - LEFT - RIGHT - 18)


def _y(value: float, low: float, high: float, top: int) -> float:
    share = (math.log10(min(high, max(low, value))) - math.log10(low)) / (math.log10(high) - math.log10(low))
    return top + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def memory(runs: list[dict[str, Any]]) -> str:
    """Bytes that the controller keeps for each rank."""
    wide, high, top = 420, 170, 30
    most = 500 * math.ceil(max(run["bytes_per_rank"] for run in runs) / 500)
    step = (wide - 70) / len(runs)
    bars = []
    for index, run in enumerate(runs):
        tall = run["bytes_per_rank"] / most * (high - top - 26)
        x, y = 54 + index * step, high - 26 - tall
        bars.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 12:.1f}" height="{tall:.1f}" rx="2" fill="#2f81f7" '
            'fill-opacity=".55"/>'
        )
        bars.append(_small(x + (step - 12) / 2, y - 4, format(run["bytes_per_rank"], ",.0f")))
        bars.append(_small(x + (step - 12) / 2, high - 12, format(run["hosts"], ",")))
    goal = high - 26 - 1000 / most * (high - top - 26)
    line = f'<path d="M50 {goal:.1f}H{wide - 8}" stroke="#db6d28" stroke-width="1.4" stroke-dasharray="5 3"/>'
    words = '<text x="12" y="16" font-weight="600">bytes that the controller keeps per rank, by hosts</text>'
    return _svg(wide, high, words + "".join(bars) + line + _small(46, goal + 3.5, "1,000", "end"))


def _small(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="10">{escape(text)}</text>'


def _svg(wide: int, high: int, inner: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{INK}">{inner}</svg>\n'
    )


def seconds(value: float) -> str:
    """In a few characters."""
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms"


def number(value: float) -> str:
    """In a few characters."""
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value:,.0f}"


def draw(runs: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes the pictures; gives their paths."""
    pictures = {
        "scale-time": picture(runs, SECONDS, 1e-4, 1e2, seconds),
        "scale-messages": picture(runs, MESSAGES, 1, 1e6, number),
        "scale-memory": memory(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in pictures.items():
        path = folder / f"{name}.svg"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for path in draw(json.loads(options.measured.read_text()), options.folder):
        print(path)


if __name__ == "__main__":
    main()
