"""Findings about ranks, and the diagnosis that contains them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "missing_from_collective",
    "mismatched_collective",
    "stuck",
    "stopped",
    "unreachable",
    "dead",
    "deadlock",
    "waiting_on",
    "nonfinite",
    "slow",
    "diverged",
    "memory",
]


@dataclass(frozen=True)
class Finding:
    """The reason why ranks of a mesh hold others up.

    `ranks` are base ranks of `mesh`, a mesh of processes. `source` is the line of the user's program, as `file:line`,
    "" where none is known. `sure` is False for a suspicion: the evidence allows another explanation.
    """

    kind: Kind
    mesh: str
    ranks: tuple[int, ...]
    text: str
    source: str = ""
    sure: bool = True

    @property
    def line(self) -> str:
        """The text, which a suspicion begins with "perhaps"."""
        return self.text if self.sure else f"perhaps: {self.text}"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one `diagnose()`, the most certain first, and what was inspected.

    `ended` says which calls `abort()` has ended, "" after `diagnose()`.
    """

    findings: tuple[Finding, ...]
    inspected: str
    ended: str = ""

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        ended = [self.ended] if self.ended else []
        if not self.findings:
            return "\n".join([f"nothing found: {self.inspected}", *ended])
        lines = [f"{'' if finding.sure else 'perhaps: '}{finding.mesh}: {finding.text}" for finding in self.findings]
        return "\n".join([*lines, f"inspected: {self.inspected}", *ended])

    __repr__ = __str__


def by_certainty(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The certain ones first."""
    return tuple(sorted(findings, key=lambda finding: not finding.sure))


class CallAbortedError(RuntimeError):
    """A call that `abort()` has ended. The text says which ranks held it up; `diagnosis` has all findings."""

    def __init__(self, text: str, diagnosis: Diagnosis) -> None:
        super().__init__(text)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[type["CallAbortedError"], tuple[str, Diagnosis]]:
        return CallAbortedError, (self.args[0], self.diagnosis)
