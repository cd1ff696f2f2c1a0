"""Bodies of the profiler's messages: which ranks are sampled, and what was seen of them since the last message."""

import msgspec


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """Sample an actor, or with `mesh` "" the whole process, until told otherwise."""

    number: int  # of the profile, as whoever asks counts them
    mesh: str
    rank: int  # base rank
    hz: float


class Began(msgspec.Struct, array_like=True, frozen=True):
    """It has begun."""

    at: float  # wall clock of the process, by which clocks of several hosts are compared


class Place(msgspec.Struct, array_like=True, frozen=True):
    """One frame of a stack. The line is the one that was seen; `users` is False for frames of installed libraries."""

    file: str
    line: int
    function: str
    first: int  # the line that the function begins at
    users: bool


class Weight(msgspec.Struct, array_like=True, frozen=True):
    """How long a stack was seen: an empty one is that of an actor that waits for messages."""

    stack: tuple[int, ...]  # numbers of places, outermost first
    seconds: float
    computing: float  # seconds of these that its thread ran on a processor
    samples: int


class Samples(msgspec.Struct, array_like=True, frozen=True):
    """What was seen since the last message of the same sampler."""

    number: int
    rank: int
    places: tuple[Place, ...]  # those that are new; they are numbered from `first` on
    first: int
    weights: tuple[Weight, ...]
    seconds: float  # that were watched
    cost: float  # seconds that the sampler's own thread ran for it
    dropped: int = 0  # samples of stacks beyond those that are told apart


class Heard(msgspec.Struct, array_like=True, frozen=True):
    """The answer to samples: whether more of them are wanted."""

    more: bool


class End(msgspec.Struct, array_like=True, frozen=True):
    """Sample no longer; the answer has the rest."""

    number: int
    mesh: str
    rank: int
