"""The progress of a job's hosts, for people."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch_nb.wire import counted

_NAMED = 4
_PLURALS = {"is": "are", "has": "have", "was": "were", "waits": "wait", "runs": "run", "does": "do"}
_VERB = re.compile(rf"\b({'|'.join(_PLURALS)})\b")


class Progress(NamedTuple):
    """The number of `wanted` hosts that have joined; `missing` has the obstacle of each of the others.

    Spares are counted separately: no mesh waits for them.
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
        reasons: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            reasons.setdefault(reason, []).append(name)
        parts = [sentence(names, reason) for reason, names in reasons.items()]
        more = f"; and {len(parts) - _NAMED} other reasons" if len(parts) > _NAMED else ""
        return f"{head}. Missing: {'; '.join(parts[:_NAMED])}{more}" if parts else head

    def bar(self, width: int = 20) -> str:
        """Returns the text with a bar before it."""
        full = width * len(self.joined) // max(1, self.wanted)
        return f"[{'#' * full}{'.' * (width - full)}] {self}"


def sentence(names: Sequence[str], predicate: str) -> str:
    """Makes a sentence about several hosts from the predicate for one, such as "waits for a node"; cuts long lists."""
    more = len(names) - _NAMED
    subject = ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    if len(names) > 1:
        predicate = _VERB.sub(lambda verb: _PLURALS[verb[0]], predicate, count=1)
    return f"{subject} {predicate}"
