"""Findings about ranks, and the diagnosis that contains them."""

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


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one `diagnose()`, the most certain first, and what was inspected."""

    findings: tuple[Finding, ...]
    inspected: str

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return f"nothing found: {self.inspected}"
        lines = [f"{'' if finding.sure else 'perhaps: '}{finding.mesh}: {finding.text}" for finding in self.findings]
        return "\n".join([*lines, f"inspected: {self.inspected}"])

    __repr__ = __str__
