"""Results of the debugger's magics: text to read, data to use."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

from monarch_nb.debug import Answers


class Listing:
    """A text that is shown unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class StoppedTable(Listing):
    """The stopped ranks at the time of its creation; live where widgets are."""


class CellResults(Sequence[Answers]):
    """Results of the commands of a cell, in order; `values` are those of the last command that had any."""

    def __init__(self, results: Sequence[Answers]) -> None:
        self._results = list(results)

    @overload
    def __getitem__(self, index: int) -> Answers: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Answers]: ...
    def __getitem__(self, index: int | slice) -> Answers | Sequence[Answers]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Answers]:
        return iter(self._results)

    @property
    def values(self) -> dict[int, Any]:
        """Values by rank of the last command that had any."""
        for result in reversed(self._results):
            if any(answer.value is not None for _, answer in result.pairs):
                return result.values
        return {}

    def __repr__(self) -> str:
        parts = [f"» {answers.command.rstrip()}\n{answers.text}".rstrip() for answers in self._results]
        return "\n".join(parts) or "no commands"
