"""The table's rows: what each shows, and its target."""

from dataclasses import dataclass

Figures = dict[str, dict[str, float]]  # row of a program -> its values


REFERENCE = "torchmonarch"  # the peer of `times_better`


@dataclass(frozen=True)
class Row:
    """A figure, its own `target`, and how many times better than the reference peer's."""

    title: str
    unit: str
    source: str  # the row in a program's figures
    value: str = "value"  # which of its values
    target: float | None = None
    times_better: float | None = None
    stretch: float | None = None
    more_is_better: bool = False
    peer_source: str = ""  # the row in a peer's figures, where it is another one
    floors: float | None = None  # so many times the bare ping-pong will do as well

    def of(self, figures: Figures, *, peer: bool = False) -> float | None:
        return figures.get((peer and self.peer_source) or self.source, {}).get(self.value)

    def met(self, mine: float, reference: float | None, floor: float | None = None) -> bool | None:
        """Whether it meets its targets, as far as they can be judged here; None if none can."""
        results = []
        if self.target is not None:
            limit = max(self.target, (self.floors or 0.0) * (floor or 0.0))
            results.append(mine >= limit if self.more_is_better else mine <= limit)
        if self.times_better is not None and reference:
            results.append(self.ratio(mine, reference) >= self.times_better)
        return all(results) if results else None

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        if not ours or not theirs:
            return float("inf") if theirs else 0.0
        return ours / theirs if self.more_is_better else theirs / ours

    @property
    def goal(self) -> str:
        """The target in words."""
        sign = "≥" if self.more_is_better else "≤"
        parts = [] if self.target is None else [f"{sign} {number(self.target)}"]
        parts += [f"or {number(self.floors)}× pyzmq"] if self.floors is not None else []
        parts += [f"{number(self.times_better)}× better"] if self.times_better is not None else []
        return ", ".join(parts) + (f" (stretch {number(self.stretch)})" if self.stretch is not None else "")


ROWS = (
    Row("ping-pong p50", "ms", "ping-pong", "p50"),
    Row("ping-pong p99", "ms", "ping-pong", "p99"),
    Row("call_one, no-op p50", "ms", "call_one", "p50", 0.2, 3, 0.14, floors=2),
    Row("call_one, no-op p99", "ms", "call_one", "p99"),
    Row("call on 4 procs p50", "ms", "call on 4", "p50"),
    Row("call on 8 procs p50", "ms", "call on 8", "p50", None, 3, 0.45),
    Row("call_one, pipelined", "calls/s", "pipelined", times_better=3, stretch=27_000, more_is_better=True),
    Row("1 MB argument p50", "ms", "1 MB argument", "p50", None, 3),
    Row("64 MB array argument", "GB/s", "64 MB argument", times_better=5, stretch=7, more_is_better=True),
    Row("64 MB argument of bytes", "GB/s", "64 MB bytes", times_better=5, stretch=7, more_is_better=True),
    Row("64 MB tensor argument", "GB/s", "64 MB tensor", times_better=5, stretch=7, more_is_better=True),
    Row("64 MB array made and given back", "GB/s", "64 MB result", times_better=5, stretch=7, more_is_better=True),
    Row("64 MB to 8 procs, all together", "GB/s", "64 MB broadcast", times_better=5, more_is_better=True),
    Row("64 MB held by 8 procs, copies in memory", "", "64 MB broadcast, copies", target=1.2),
    Row("RDMABuffer: 256 MB read, same host", "GB/s", "data: read 256 MB", times_better=5, more_is_better=True),
    Row("RDMABuffer: 256 MB read, of a memcpy", "×", "data: read 256 MB", "part", 0.9, more_is_better=True),
    Row("RDMABuffer: 256 MB written, of a memcpy", "×", "data: write 256 MB", "part", more_is_better=True),
    Row("RDMABuffer: 64 bytes read p50", "ms", "data: read 64 B", "p50", 0.015),
    Row("RDMAAction: 1,000 reads of 64 kB, of a memcpy", "×", "data: batch", "part", 0.7, more_is_better=True),
    Row("64 × 64 tensors added on 2 procs: controller", "µs", "tensors: add", "us", 12, 50),
    Row("the same in place: controller", "µs", "tensors: add in place", "us", 12),
    Row("the same with a gradient recorded: controller", "µs", "tensors: add with gradient", "us"),
    Row("item() of a tensor that each proc has p50", "ms", "tensors: item", "p50"),
    Row("item(), of a call to one proc", "×", "tensors: item, of a call", "ratio", 3),
    *(
        row
        for size, done, fetched, called, ended, compiled in ((1, 20, 0.4, 0.4, 5, 1), (4, 60, 0.6, 0.8, 12, 2))
        for row in (
            Row(f"own values, {size} procs: 2,000 dependent adds, one", "µs", f"ranks: adds, {size}", "us", done, 50),
            Row(f"own values, {size} procs: an add, controller", "µs", f"ranks: add, {size}", "us", 10),
            Row(f"own values, {size} procs: fetch of a scalar p50", "ms", f"ranks: fetch, {size}", "p50", fetched),
            Row(f"own values, {size} procs: remote(f).call().get() p50", "ms", f"ranks: call, {size}", "p50", called),
            Row(
                f"own values, {size} procs: step of two linears, issued p50",
                "ms",
                f"ranks: step issued, {size}",
                "p50",
                1.5,
            ),
            Row(f"own values, {size} procs: the same, with its loss p50", "ms", f"ranks: step, {size}", "p50", ended),
            Row(
                f"own values, {size} procs: compiled step of 50 adds p50",
                "ms",
                f"ranks: compiled, {size}",
                "p50",
                compiled,
            ),
            Row(f"own values, {size} procs: first activate", "s", f"ranks: activated, {size}", "s", 0.3),
            Row(f"own values, {size} procs: memory of a worker", "MB", f"ranks: worker, {size}", "mb", 25),
        )
    ),
    Row("1 GB on 2 procs: memory of the controller", "MB", "tensors: 1 GB, memory here", "mb", 1),
    Row("step of a transformer on 2 procs, tensor-parallel p50", "ms", "tensors: step", "p50"),
    Row("the same, of torchrun's with the same step", "×", "tensors: step, of torchrun's", "ratio", 1.05),
    Row("the same compiled: controller", "ms", "tensors: compiled step, large, controller", "ms", 0.3),
    Row("the same compiled, of the step", "×", "tensors: compiled step, large, of the step", "ratio"),
    Row(
        "step of a small one, data-parallel: controller",
        "ms",
        "tensors: compiled step, small, controller",
        "ms",
        0.3,
    ),
    Row("the same, of the step as written", "×", "tensors: compiled step, small, of the step", "ratio", 0.6),
    Row("the same by PyTorch's compiler, of the step as written", "×", "tensors: inductor, of the step", "ratio", 0.35),
    Row("the same, of torchrun's with torch.compile", "×", "tensors: inductor, of torchrun's", "ratio", 1),
    Row("the same: PyTorch's compiler has made it after", "s", "tensors: inductor, made", "s"),
    Row("20 losses in four layouts, farthest from one process's", "×", "tensors: losses", "apart", 0.0001),
    Row("operations while a display shows the tensors, of those without", "×", "tensors: with a face", "ratio", 1.05),
    Row("a rank of 4 is killed in a step: DeviceMeshError p50", "ms", "tensors: kill told", "p50", 100),
    Row("the mesh is healed and computes p50", "ms", "tensors: kill healed", "p50", 1000),
    Row("the same with a spare process p50", "ms", "tensors: kill healed by a spare", "p50", 100),
    Row(
        "256 MB of weights pulled by 4 generators, of memcpys as many",
        "×",
        "sync: weights",
        "part",
        0.7,
        more_is_better=True,
    ),
    Row("256 MB of weights pulled by 4 generators, each", "GB/s", "sync: weights", more_is_better=True),
    Row("learner's step while one pulls all the time", "% more", "sync: learner's step", "above", 5),
    Row("rows fed to 4 ranks, of reading them in one process", "×", "sync: feed", "part", 0.8, more_is_better=True),
    Row("rows fed to 4 ranks", "GB/s", "sync: feed", more_is_better=True),
    Row("rows fed to 4 ranks: memory of the controller", "MB more", "sync: feed, controller", "grown"),
    Row(
        "200 × 16 KB state dict as argument, of torch.save and load",
        "×",
        "sync: state dict",
        "part",
        3,
        more_is_better=True,
    ),
    Row("100 × 64 MB sent: memory of the controller", "MB more", "sync: bulk", "grown", 8),
    Row("100 × 64 MB sent: descriptors of the controller", "more", "sync: bulk", "files", 0),
    Row("template ready", "s", "template ready"),
    Row("8 procs to first reply, warm p50", "ms", "8 procs to first reply", "p50", 400),
    Row(
        "%load_ext to first reply of a proc, cold p50",
        "ms",
        "load_ext to first reply, cold",
        "p50",
        None,
        1,
        peer_source="import to first reply, cold",
    ),
    Row("import to first reply of a proc, cold p50", "ms", "import to first reply, cold", "p50", None, 1),
    Row("spawn to first reply of a proc, cold p50", "ms", "spawn to first reply, cold", "p50"),
    Row("death of a proc reported p50", "ms", "death told", "p50"),
    Row("death of a proc reported p95", "ms", "death told", "p95", 50),
    Row("death healed p50", "ms", "death healed", "p50"),
    Row("death healed p95", "ms", "death healed", "p95", 1000),
    Row("idle proc with torch, above a bare import torch", "MB", "idle proc", "above", 15),
    Row("idle proc with torch, private memory", "MB", "idle proc", "private"),
    Row("idle proc, processor", "%", "idle proc runs", "cpu", 0.5),
    Row("idle proc, wake-ups", "/s", "idle proc runs", "wakes"),
    Row("idle controller, processor", "%", "idle controller runs", "cpu", 0.5),
    Row("controller, memory of one more actor", "kB", "controller, one more actor", target=4),
    Row("64 procs × 10 actors: spawned, first replies", "s", "scale: spawned"),
    Row("64 procs × 10 actors: all called", "s", "scale: all called"),
    Row("64 procs × 10 actors: one killed, all reported", "s", "scale: told"),
    Row("64 procs × 10 actors: healed, all reply", "s", "scale: healed"),
    Row("64 procs × 10 actors: stopped", "s", "scale: stopped"),
    Row("call_one while 8 ranks write 1 MB/s each, of its idle p50", "×", "logs", "ratio", 2),
    Row("what 8 ranks wrote meanwhile, all together", "MB/s", "logs", "rate"),
    Row("of it in the log files", "%", "logs", "kept", 100, more_is_better=True),
    Row("8 ranks at a breakpoint: shown p95", "ms", "debug: 8 stops shown", "p95", 200),
    Row("64 ranks at a breakpoint: shown p95", "ms", "debug: 64 stops shown", "p95", 1000),
    Row("64 ranks at a breakpoint: a command p95", "ms", "debug: 64 stops answered", "p95", 300),
    Row("call_one to an actor that had a breakpoint once", "% more", "debug: unattached", "above", 5),
    *(
        row
        for ranks, stop, step in ((8, 200, 60), (64, 500, None))
        for row in (
            Row(f"a breakpoint in the gutter: {ranks} ranks armed p95", "ms", f"dap: {ranks} ranks armed", "p95", 150),
            Row(f"{ranks} ranks at it: one seen in the debugger p95", "ms", f"dap: {ranks} ranks stop", "p95", stop),
            Row(f"{ranks} ranks at it: all listed beside it p95", "ms", f"dap: {ranks} ranks listed", "p95", stop),
            Row(
                f"a step of {ranks} ranks, seen p50",
                "ms",
                f"dap: {ranks} ranks step",
                "p50",
                60 if ranks == 8 else None,
            ),
        )
    ),
    Row("variables of a frame with a tensor of 1 GB p95", "ms", "dap: variables beside 1 GB", "p95", 100),
    Row("and by how much its process grows meanwhile", "MB", "dap: memory beside 1 GB", "grown", 50),
    Row("call_one beside the debugger, to a class without breakpoints", "×", "dap: calls beside it", "ratio", 1.02),
    Row("sampling 64 ranks, of each", "%", "dap: sampling", "percent", 3),
    Row("reducer: 10,000 ranks, 1,000 events/s, processor", "%", "faces: reducer", "share", 5),
    Row("an event that nobody looks at", "µs", "faces: nobody looks", "us"),
    Row("a rank is busy: shown in its cell, while a cell blocks p95", "ms", "page: busy, mesh", "p95", 250),
    Row("a rank is busy: shown in the panel p95", "ms", "page: busy, panel", "p95", 250),
    Row("a process is killed: red in its cell, while a cell blocks p95", "ms", "page: killed, mesh", "p95", 250),
    Row("a process is killed: red in the panel p95", "ms", "page: killed, panel", "p95", 250),
    Row("a process is killed: shown in the status bar p95", "ms", "page: killed, status bar", "p95", 250),
    Row("1,000 ranks shown, 1,000 events/s: kernel, processor", "%", "faces: kernel", "share", 5),
    Row("1,000 ranks shown, 1,000 events/s: messages to the page", "/s", "faces: messages", "rate"),
    Row("1,000 ranks shown, 1,000 events/s: longest task of the page", "ms", "faces: page", "longest", 50),
    Row("1,000 ranks shown, 1,000 events/s: and its processor time", "ms", "faces: page", "cpu", 50),
    Row("1,000 ranks shown, 1,000 events/s: page's heap, grown in half of the time", "MB", "faces: heap", "grown", 2),
    *(
        Row(
            f"{event}: displays know it while a cell blocks, ipykernel {kernel}, max",
            "ms",
            f"sight: {row}, {name}",
            "most",
            250,
        )
        for kernel, name in (("7.3", "ipykernel-7.3"), ("7.4", "ipykernel-7.4"))
        for event, row in (("SIGKILL", "killed"), ("a rank goes busy", "busy"), ("a rank stops", "stopped"))
    ),
    Row("failing call whose frames are kept", "% more", "debug: frames kept", "above", 5),
)

LEFT = (0, 1, 4)  # the columns that are not numbers


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def cells(measured: dict[str, Figures], floor: Figures, *, only: bool) -> list[list[str]]:
    """The table, its head first; `measured` has ours first, `floor` is bare ZeroMQ. `only`: rows with figures."""
    (ours_name, ours), *peers = measured.items()
    lines = [["", "unit", "target", ours_name, "", "pyzmq", *(name for name, _ in peers)]]
    bare_p50 = floor.get("ping-pong", {}).get("p50")
    for row in ROWS:
        mine, bare = row.of(ours), row.of(floor)
        if only and mine is None:
            continue
        reference = row.of(measured.get(REFERENCE, {}), peer=True)
        met = row.met(mine, reference, bare_p50) if mine is not None else None
        mark = {True: "met", False: "MISSED", None: ""}[met]
        line = [row.title, row.unit, row.goal, number(mine), mark, number(bare)]
        for _, figures in peers:
            theirs = row.of(figures, peer=True)
            better = mine is not None and theirs is not None and mine > 0 < theirs
            line.append(number(theirs) + (f" ({number(row.ratio(mine or 0, theirs or 0))}×)" if better else ""))
        lines.append(line)
    return lines


def table(measured: dict[str, Figures], floor: Figures, *, only: bool = False) -> str:
    """For a terminal."""
    lines = cells(measured, floor, only=only)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def markdown(measured: dict[str, Figures], floor: Figures, environment: str, *, only: bool = False) -> str:
    """For docs/performance.md: `environment` says on what machine and when."""
    head, *lines = cells(measured, floor, only=only)
    marks = ["---" if column in LEFT else "---:" for column in range(len(head))]
    return "\n".join([environment, "", *(f"| {' | '.join(line)} |" for line in (head, marks, *lines))])


def _line(cells: list[str], widths: list[int]) -> str:
    placed = [
        cell.ljust(width) if column in LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(placed).rstrip()
