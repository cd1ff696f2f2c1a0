"""Messages about the process groups of tensor meshes, which overtake operations that may hang, and reports of failed
operations in messages. Does not import torch.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from monarch_nb.wire import Harmless, Verb


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


class RankFailed(msgspec.Struct, array_like=True, frozen=True):
    """An operation failed on one rank of a group, which waits for the outcome on the other ranks."""

    group: str
    generation: int
    rank: int  # in the group
    ranks: tuple[int, ...]  # participants in the operation, in the group
    failure: Failure
    begun: int | None = None  # the first operation of the compiled step that contains it


class GoOn(msgspec.Struct, array_like=True, frozen=True):
    """The operation failed on all ranks, so that no collective waits."""

    group: str
    generation: int
    stream: int
    number: int


class CutGroup(msgspec.Struct, array_like=True, frozen=True):
    """A generation and its collectives are over, since a member was lost or an operation failed on some ranks only."""

    group: str
    generation: int
    reason: str
    failures: tuple[Failure, ...] = ()


class Interrupted(msgspec.Struct, array_like=True, frozen=True):
    """An interrupt did not end what a rank executes."""

    group: str
    generation: int


class HowFar(msgspec.Struct, array_like=True, frozen=True):
    """Asks a rank for the number of operations of a stream that it has run."""

    group: str
    stream: int


class StreamProgress(msgspec.Struct, array_like=True, frozen=True):
    """Number of operations run.

    `held` is the reason why the rank cannot leave a generation that was ended; "" if it can.
    """

    done: int
    held: str = ""


class AskUsed(msgspec.Struct, array_like=True, frozen=True):
    """Asks for the memory and time that a rank uses for a stream."""

    group: str
    stream: int


class Spent(msgspec.Struct, array_like=True, frozen=True):
    """Seconds that a rank spent on moving shards along these mesh dimensions, in one cell of the program."""

    cell: int
    dims: tuple[int, ...]
    seconds: float


class MemoryUsed(msgspec.Struct, array_like=True, frozen=True):
    """Bytes on a rank: of the stream's tensors, allocated by its process (or device), and the peak of that."""

    live: int = 0
    allocated: int = 0
    peak: int = 0
    spent: list[Spent] = []


class AskValues(msgspec.Struct, array_like=True, frozen=True):
    """Asks for a rank's values of a tensor, after it has run `after` operations or a time-out.

    `edge` is the number of elements to send along each of the last two dimensions.
    """

    group: str
    stream: int
    number: int
    after: int
    edge: int


class Values(msgspec.Struct, array_like=True, frozen=True):
    """A rank's values of a tensor; `state` is `there`, `coming` before an operation has made it, or `lost` with `why`.

    `corner` has the first elements, row by row, in the sizes `shape`; complex numbers as two floats. The statistics
    cover all local elements: without NaN, and the mean without infinities. `behind`: the rank has not run all
    operations issued before.
    """

    state: str
    why: str = ""
    behind: bool = False
    shape: tuple[int, ...] = ()
    corner: tuple[float | int, ...] = ()
    count: int = 0
    least: float | int | None = None
    most: float | int | None = None
    mean: float | None = None
    nan: int = 0
    infinite: int = 0


FAILED = Verb("tensor.failed", RankFailed, doc="an operation failed on this rank: has it on all?")
GO_ON = Verb("tensor.go_on", GoOn, doc="it failed on all ranks alike: go on with the next operation")
CUT = Verb("tensor.cut", CutGroup, doc="the process group is broken: leave its collectives")
INTERRUPTED = Verb("tensor.interrupted", Interrupted, doc="an interrupt has not ended what runs here")
HOW_FAR = Verb("tensor.how_far", HowFar, StreamProgress, doc="how many operations of a stream have you done?")
USED = Verb("tensor.used", AskUsed, MemoryUsed, doc="how much memory and time do the tensors of a stream take here?")
VALUES = Verb("tensor.values", AskValues, Values, doc="which values of this tensor do you have?")
