"""Many random programs, in processes that each have meshes of their own; those that end or stop answering cost one."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.effort import AS_LATER

MESHES = ((2,), (2, 2), (3,), (2, 1, 2), (2,), (2, 2), (3, 2), (2, 2, 2))  # a program of each in turn
QUIET = 600  # seconds without a report after which a process is ended
CHUNK = 1000  # programs for one process: it grows by what PyTorch and a mesh remember of each
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Report:
    """The outcome of the program of one seed. `smallest` is a program to paste, for those that failed."""

    seed: int
    mesh: tuple[int, ...]
    kind: str
    reason: str = ""
    text: str = ""
    smallest: str = ""

    @property
    def has_failed(self) -> bool:
        return self.kind not in ("equal", "refused", "unjudged")

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        return f"seed {self.seed} on {size}: {self.kind}, {self.reason}\n{self.text}\n{self.smallest}"


@dataclass
class Tally:
    begun: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)
    seeds: set[int] = field(default_factory=set)
    refusals: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    failures: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.kinds[report.kind] += 1
        self.seeds.add(report.seed)
        if report.kind == "refused":
            self.refusals[report.reason].append(report.seed)
        elif report.has_failed:
            self.failures.append(report)

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    @property
    def too_many_refused(self) -> bool:
        return self.kinds["refused"] * 10 >= self.count > 0

    @property
    def too_many_unjudged(self) -> bool:
        """More than one, and more than 0.5 %: then the judge hides what it should find."""
        return self.kinds["unjudged"] > max(1, self.count / 200)

    def line(self) -> str:
        took, refused = time.monotonic() - self.begun, 100 * self.kinds["refused"] / max(self.count, 1)
        failed = ", ".join(f"{self.kinds[kind]} {kind}" for kind in ("unjudged", "wrong", "hung", "dead"))
        return f"{self.count} programs: {self.kinds['equal']} right, {refused:.2f} % refused, {failed} ({took:.0f} s)"

    def __str__(self) -> str:
        lines = [self.line()]
        for reason, seeds in sorted(self.refusals.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {len(seeds)} refused: {reason} (seed {seeds[0]})")
        return "\n".join(lines)


def mesh_of(seed: int, meshes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return meshes[seed % len(meshes)]


def run(
    seeds: Sequence[int],
    meshes: Sequence[tuple[int, ...]] = MESHES,
    *,
    jobs: int = 2,
    on_report: Callable[[Report], object] = lambda report: None,
    shrink: bool = True,
    device: str = "cpu",
    compiled: str = "",
) -> Tally:
    """Runs the programs of these seeds, `jobs` at a time; `compiled` is a backend, for calls as compiled steps."""
    tally = Tally()
    options = [
        "--device",
        device,
        *(["--compiled", compiled] if compiled else []),
        *([] if shrink else ["--no-shrink"]),
    ]
    workers = [_Worker(list(seeds[first::jobs]), meshes, options) for first in range(jobs)]
    try:
        while any(not worker.done for worker in workers):
            ready, _, _ = select.select([worker.pipe for worker in workers if not worker.done], [], [], 5.0)
            for worker in workers:
                for report in worker.read_reports(worker.pipe in ready) if not worker.done else ():
                    tally.add(report)
                    on_report(report)
    finally:
        for worker in workers:
            worker.end()
    return tally


class _Worker:
    """A process that runs programs, and reports the outcome of each."""

    def __init__(self, seeds: list[int], meshes: Sequence[tuple[int, ...]], options: Sequence[str]) -> None:
        self._seeds, self._meshes, self._options = seeds, meshes, options
        self._chunk: set[int] = set()  # seeds that the process has and has not reported
        self.done = not seeds
        self.pipe = -1
        if seeds:
            self._begin()

    def _begin(self) -> None:
        self.pipe, write = os.pipe()
        self._buffer = b""
        self._last = time.monotonic()
        command = [sys.executable, "-m", "tests.random_programs", "--report", str(write), *self._options]
        command += ["--meshes", *("x".join(map(str, mesh)) for mesh in self._meshes)]
        self._process = subprocess.Popen(
            command, pass_fds=(write,), stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True,
            env={**os.environ, "MONARCH_NB_PRELOAD": AS_LATER}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(write)
        assert self._process.stdin is not None
        chunk = self._seeds[:CHUNK]
        self._chunk = set(chunk)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write((json.dumps(chunk) + "\n").encode())
            self._process.stdin.close()

    def read_reports(self, ready: bool) -> Iterator[Report]:
        """The reports so far. Begins another process in place of one that has ended."""
        if ready:
            self._last = time.monotonic()
            data = os.read(self.pipe, 1 << 16)
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                fields: dict[str, Any] = json.loads(line)
                fields["mesh"] = tuple(fields["mesh"])
                self._seeds.remove(fields["seed"])
                self._chunk.discard(fields["seed"])
                yield Report(**fields)
            if not data:
                status = self._process.wait()
                yield from self._without_answer("dead", f"its controller ended with status {status}")
        elif time.monotonic() - self._last > QUIET:
            self.end()
            yield from self._without_answer("hung", f"no word for {QUIET} s")

    def _without_answer(self, kind: str, text: str) -> Iterator[Report]:
        os.close(self.pipe)
        self.pipe = -1
        if self._chunk:
            seed = self._seeds.pop(0)
            yield Report(seed, mesh_of(seed, self._meshes), kind, text, text)
        if self._seeds:
            self._begin()
        else:
            self.done = True

    def end(self) -> None:
        """Ends its process, if that runs still."""
        if self.pipe >= 0 and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
