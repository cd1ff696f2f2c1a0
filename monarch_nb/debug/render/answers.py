"""Results of a command: the text to show, and the answers by rank. Pure."""

from dataclasses import dataclass
from typing import Any

from monarch_nb.debug.records import Value
from monarch_nb.debug.render.merge import Pair, plain


@dataclass(frozen=True)
class Answers:
    """Results of a command: the text to show, and the answers by rank."""

    command: str
    text: str
    pairs: tuple[Pair, ...] = ()

    @property
    def values(self) -> dict[int, Any]:
        """Values by rank: numbers as numbers, others as text; None without a value."""
        return {record.rank: plain(answer.value) for record, answer in self.pairs}

    @property
    def summaries(self) -> dict[int, Value | None]:
        """Summaries of values by rank: type, and for tensors shape, extremes and NaN count."""
        return {record.rank: answer.value for record, answer in self.pairs}

    @property
    def errors(self) -> dict[int, str]:
        """Errors by rank."""
        return {record.rank: answer.error for record, answer in self.pairs if answer.error}

    def __str__(self) -> str:
        return self.text
