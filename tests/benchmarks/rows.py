"""The table's rows: what each shows, and where it should be."""

from dataclasses import dataclass

Figures = dict[str, dict[str, float]]  # row of a program -> its values


@dataclass(frozen=True)
class Row:
    title: str
    unit: str
    source: str  # the row in a program's figures
    value: str = "value"  # which of its values
    target: float | None = None
    more_is_better: bool = False

    def of(self, figures: Figures) -> float | None:
        return figures.get(self.source, {}).get(self.value)

    def met(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.more_is_better else value <= self.target

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ours / theirs if self.more_is_better else theirs / ours


ROWS = (
    Row("ping-pong p50", "ms", "ping-pong", "p50"),
    Row("ping-pong p99", "ms", "ping-pong", "p99"),
    Row("call_one, no-op p50", "ms", "call_one", "p50", target=0.3),
    Row("call_one, no-op p99", "ms", "call_one", "p99"),
    Row("call on 4 procs p50", "ms", "call on 4", "p50"),
    Row("call on 8 procs p50", "ms", "call on 8", "p50", target=1.2),
    Row("call_one, pipelined", "calls/s", "pipelined", more_is_better=True),
    Row("1 MB argument p50", "ms", "1 MB argument", "p50"),
    Row("64 MB argument", "GB/s", "64 MB argument", more_is_better=True),
    Row("first reply, cold", "ms", "first reply, cold"),
    Row("8 procs to first reply p50", "ms", "8 procs to first reply", "p50"),
    Row("death of a proc told p50", "ms", "death told", "p50"),
    Row("death of a proc told p95", "ms", "death told", "p95", target=100),
    Row("death healed p50", "ms", "death healed", "p50"),
    Row("death healed p95", "ms", "death healed", "p95", target=1500),
)

LEFT = (0, 1, 4)  # the columns that are not numbers


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 0.1 else f"{value:.3g}"


def table(measured: dict[str, Figures], floor: Figures) -> str:
    """`measured` has ours first; `floor` is bare ZeroMQ."""
    (ours_name, ours), *peers = measured.items()
    lines = [["", "unit", "target", ours_name, "", "pyzmq", *(name for name, _ in peers)]]
    for row in ROWS:
        mine, bare = row.of(ours), row.of(floor)
        met = row.met(mine) if mine is not None else None
        mark = {True: "met", False: "MISSED", None: ""}[met]
        target = "" if row.target is None else f"{'≥' if row.more_is_better else '≤'} {number(row.target)}"
        cells = [row.title, row.unit, target, number(mine), mark, number(bare)]
        for _, figures in peers:
            theirs = row.of(figures)
            cells.append(number(theirs) + (f" ({number(row.ratio(mine, theirs))}×)" if mine and theirs else ""))
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: list[str], widths: list[int]) -> str:
    placed = [
        cell.ljust(width) if at in LEFT else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(placed).rstrip()
