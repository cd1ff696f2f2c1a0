"""The progress of a job's hosts, for people."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch_nb.wire import counted

_NAMED = 4


class Progress(NamedTuple):
    """So many of `wanted` hosts have joined; `missing` has, for each of the others, what it waits for.

    Spares are counted separately: nobody waits for them.
    """

    wanted: int
    joined: tuple[str, ...]
    missing: Mapping[str, str]
    spares: tuple[str, ...] = ()
    wanted_spares: int = 0

    def __str__(self) -> str:
        head = f"{len(self.joined)}/{counted(self.wanted, 'host')} joined"
        if self.wanted_spares:
            head += f", {len(self.spares)}/{counted(self.wanted_spares, 'spare')}"
        by_description: dict[str, list[str]] = {}
        for name, description in self.missing.items():
            by_description.setdefault(description, []).append(name)
        parts = [f"{shortened(names)} {description}" for description, names in by_description.items()]
        more = f"; and {len(parts) - _NAMED} other reasons" if len(parts) > _NAMED else ""
        return f"{head}. Missing: {'; '.join(parts[:_NAMED])}{more}" if parts else head

    def bar(self, width: int = 20) -> str:
        """Returns the text with a bar before it."""
        full = width * len(self.joined) // max(1, self.wanted)
        return f"[{'#' * full}{'.' * (width - full)}] {self}"


def shortened(names: Sequence[str]) -> str:
    """Joins names, or the first of many."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
