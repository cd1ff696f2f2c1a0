"""Results of random programs in a file, so that a long run goes on where it ended."""

import json
from collections.abc import Container, Iterator
from dataclasses import asdict
from pathlib import Path

from tests.random_programs.runner import Report


class Results:
    """A file with one report on each line, of which the last of each seed counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:  # without a line that was cut off
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def known(self, seeds: Container[int]) -> Iterator[Report]:
        """The reports of these seeds, but for failures, which are run again."""
        last: dict[int, Report] = {}
        for line in self._path.read_text().splitlines():
            report = json.loads(line)
            last[report["seed"]] = Report(**{**report, "mesh": tuple(report["mesh"])})
        yield from (report for report in last.values() if report.seed in seeds and not report.has_failed)

    def add(self, report: Report) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
