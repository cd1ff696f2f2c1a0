"""Engine messages about the process groups of tensor meshes: they overtake the operations, which may hang."""

import msgspec

from monarch_nb.tensor.failure import Failure
from monarch_nb.wire import Verb


class RankFailed(msgspec.Struct, array_like=True, frozen=True):
    """An operation failed on one rank of a group, which does nothing more until it is told how the others did."""

    group: str
    generation: int
    rank: int  # in the group
    ranks: tuple[int, ...]  # that take part in the operation, likewise
    failure: Failure
    begun: int | None = None  # the first operation of the compiled step that it is of


class GoOn(msgspec.Struct, array_like=True, frozen=True):
    """The operation failed on all ranks alike: no collective waits for anybody."""

    group: str
    generation: int
    stream: int
    number: int


class Cut(msgspec.Struct, array_like=True, frozen=True):
    """A generation is over, and its collectives with it: a member is gone, or an operation failed on some ranks."""

    group: str
    generation: int
    reason: str
    failures: tuple[Failure, ...] = ()


class Interrupted(msgspec.Struct, array_like=True, frozen=True):
    """A rank was interrupted, and did not end by that what it does."""

    group: str
    generation: int


class HowFar(msgspec.Struct, array_like=True, frozen=True):
    """Asks how many operations of a stream a rank has done."""

    group: str
    stream: int


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """How many it has done.

    `held` says what it is still in of a generation that was ended, and why that cannot be left; "" for nothing.
    """

    done: int
    held: str = ""


class AskUsed(msgspec.Struct, array_like=True, frozen=True):
    """Asks what a rank uses for a stream."""

    group: str
    stream: int


class Spent(msgspec.Struct, array_like=True, frozen=True):
    """Seconds in which a rank moved shards in one cell of the program, along these dimensions of the mesh."""

    cell: int
    dims: tuple[int, ...]
    seconds: float


class Used(msgspec.Struct, array_like=True, frozen=True):
    """Bytes on a rank: of the stream's tensors, of all that its process has (or its device), and the most of that."""

    live: int = 0
    allocated: int = 0
    peak: int = 0
    spent: list[Spent] = []


class AskValues(msgspec.Struct, array_like=True, frozen=True):
    """Asks for what a rank has of a tensor of a stream, once it has done so many operations, or does not come to it.

    `edge` is how many elements along each of the last two dimensions are wanted themselves.
    """

    group: str
    stream: int
    number: int
    after: int
    edge: int


class Values(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has of a tensor: `there`; or `coming`, while no operation has made it; or `lost`, with `why`.

    `corner` has the first elements, row by row, in the sizes `shape`; of complex numbers, both parts of each. What is
    counted and compared is of all that the rank has: NaN aside, and infinities aside from the mean. `behind` says that
    the rank has not done all that was issued before.
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
CUT = Verb("tensor.cut", Cut, doc="the process group is broken: leave its collectives")
INTERRUPTED = Verb("tensor.interrupted", Interrupted, doc="an interrupt has not ended what runs here")
HOW_FAR = Verb("tensor.how_far", HowFar, Progress, doc="how many operations of a stream have you done?")
USED = Verb("tensor.used", AskUsed, Used, doc="how much memory and time do the tensors of a stream take here?")
VALUES = Verb("tensor.values", AskValues, Values, doc="which values of this tensor do you have?")
