"""Report of an operation that failed on one rank, and the placeholder of its results there.

Does not import torch, since it is part of runtime messages.
"""

from collections.abc import Sequence
from typing import ClassVar

from monarch_nb.wire import Harmless


class Failure(Harmless, array_like=True, frozen=True):
    """A failed operation, and the rank on which it failed.

    If memory ran out, `held` has the stream's tensors on the rank: numbers and bytes, the largest first. A last
    entry without a number has the bytes of all further ones.
    """

    PROSE: ClassVar = ("text", "traceback")

    number: int  # of the operation in the stream of its mesh
    operation: str
    rank: int
    type_name: str
    text: str
    traceback: str  # formatted
    stream: int = 0
    apart: bool = False  # other ranks continue: its result is lost on this one alone
    held: tuple[tuple[int, int], ...] = ()

    @property
    def line(self) -> str:
        """Type and first line of the error text."""
        first = next(iter(self.text.strip().splitlines()), "")
        return f"{self.type_name}: {first}" if first else self.type_name


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns `rank 2`, or `ranks 0, 1 and 5 more`."""
    distinct = sorted(set(ranks))
    if len(distinct) == 1:
        return f"rank {distinct[0]}"
    shown = ", ".join(map(str, distinct[:4]))
    return f"ranks {shown}" + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")


class LostTensor:
    """Placeholder of a tensor that an operation failed to create or to change."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class LostInputError(Exception):
    """An operation needs the result of a failed operation, which is reported instead."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return LostInputError, (self.failure,)
