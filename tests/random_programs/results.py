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
        """Of these programs, those that were right or refused. What failed is to be run again."""
        last: dict[int, Report] = {}
        for line in self._path.read_text().splitlines():
            found = json.loads(line)
            last[found["seed"]] = Report(**{**found, "mesh": tuple(found["mesh"])})
        yield from (one for one in last.values() if one.seed in seeds and one.kind in ("equal", "refused"))

    def add(self, report: Report) -> None:
        """One line more."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
