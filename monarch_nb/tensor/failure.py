"""An operation that failed on one rank, as the worker tells it. Needs no torch: it is in engine messages, too."""

from collections.abc import Sequence

import msgspec


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """What failed where."""

    number: int  # which operation of the mesh's stream
    operation: str
    rank: int
    type_name: str
    text: str
    story: str  # its formatted traceback
    stream: int = 0

    @property
    def line(self) -> str:
        """Type and first line of its text."""
        first = next(iter(self.text.strip().splitlines()), "")
        return f"{self.type_name}: {first}" if first else self.type_name


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1 and 5 more`."""
    each = sorted(set(ranks))
    if len(each) == 1:
        return f"rank {each[0]}"
    shown = ", ".join(map(str, each[:4]))
    return f"ranks {shown}" + (f" and {len(each) - 4} more" if len(each) > 4 else "")
