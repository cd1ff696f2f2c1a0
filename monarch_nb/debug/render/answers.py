"""What came of a command: the text that is shown, and by rank what each has answered. Pure."""

from dataclasses import dataclass
from typing import Any

from monarch_nb.debug.records import Value
from monarch_nb.debug.render.merge import Pair, plain


@dataclass(frozen=True)
class Answers:
    """What came of one command: the text that is shown, and by rank what each has answered."""

    command: str
    text: str
    pairs: tuple[Pair, ...] = ()

    @property
    def values(self) -> dict[int, Any]:
        """By rank, the value: numbers as numbers, else as text. None where there was none."""
        return {record.rank: plain(answer.value) for record, answer in self.pairs}

    @property
    def summaries(self) -> dict[int, Value | None]:
        """By rank, all that is known of the value: its type, of tensors the shape, extremes and NaN count."""
        return {record.rank: answer.value for record, answer in self.pairs}

    @property
    def errors(self) -> dict[int, str]:
        """By rank, what went wrong."""
        return {record.rank: answer.error for record, answer in self.pairs if answer.error}

    def __str__(self) -> str:
        return self.text
