"""Findings about ranks, and the diagnosis that contains them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from monarch_nb.shape import Region, places_of

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
UNRECORDED = (
    "collectives are not recorded there: the variable TORCH_FR_BUFFER_SIZE is 0, or this PyTorch records none of gloo"
)


@dataclass(frozen=True)
class Finding:
    """A reason why ranks of a mesh hold others up.

    `ranks` are base ranks of `mesh`, a mesh of processes. `source` is the line of the user's program, as `file:line`,
    "" where none is known. `sure` is False for a suspicion: the evidence allows another explanation. `waiting_on` is
    never sure: that others wait for these ranks is a fact, that something is wrong with them is not known.
    """

    kind: Kind
    mesh: str
    ranks: tuple[int, ...]
    text: str
    source: str = ""
    sure: bool = True

    @property
    def line(self) -> str:
        """The text; that of a suspicion begins with "perhaps"."""
        return f"perhaps: {self.text}" if self.is_suspicion else self.text

    @property
    def is_suspicion(self) -> bool:
        """True if the text may be wrong; that others wait for a rank is a fact, though it may be no fault."""
        return not self.sure and self.kind != "waiting_on"


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
        lines = [f"{'perhaps: ' * finding.is_suspicion}{finding.mesh}: {finding.text}" for finding in self.findings]
        return "\n".join([*lines, f"inspected: {self.inspected}", *ended])

    __repr__ = __str__


def names_of(region: Region, ranks: Iterable[int]) -> str:
    """Returns the names of base ranks in messages: "gpus=0-2"."""
    return places_of(region, ranks) or "the only rank"


def by_certainty(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns findings with the certain ones first."""
    return tuple(sorted(findings, key=lambda finding: not finding.sure))


class CallAbortedError(RuntimeError):
    """A call that `abort()` has ended. The text says which ranks held it up; `diagnosis` has all findings."""

    def __init__(self, text: str, diagnosis: Diagnosis) -> None:
        super().__init__(text)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[type["CallAbortedError"], tuple[str, Diagnosis]]:
        return CallAbortedError, (self.args[0], self.diagnosis)
