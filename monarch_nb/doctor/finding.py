"""Results of checks, with advice."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from monarch_nb.wire import counted

Level = Literal["ok", "warning", "error"]
_MARKS: dict[Level, str] = {"ok": "✓", "warning": "!", "error": "✗"}


class Check(Struct, frozen=True):
    """Result of a check. `advice` says what to do, "" for nothing."""

    about: str
    level: Level
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        """The character in front of the result."""
        return _MARKS[self.level]


def table(findings: Iterable[Check]) -> str:
    """Formats findings as lines, each with its advice below."""
    rows = list(findings)
    width = max((len(finding.about) for finding in rows), default=0)
    lines = []
    for finding in rows:
        first, *more = finding.found.splitlines() or [""]
        lines.append(f"{finding.mark} {finding.about.ljust(width)}  {first}")
        lines += [f"{' ' * (width + 4)}{line}" for line in (*more, *finding.advice.splitlines())]
    return "\n".join(lines)


def summary(findings: Iterable[Check]) -> str:
    """Summarizes findings in one line."""
    levels = [finding.level for finding in findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return "No problems were found."
    counts = [_many(errors, "error", _MARKS["error"]), _many(warnings, "warning", _MARKS["warning"])]
    return f"{' and '.join(filter(None, counts))}. The lines below the marks say what to do."


def _many(count: int, noun: str, mark: str) -> str:
    return f"{counted(count, noun)} ({mark})" if count else ""
