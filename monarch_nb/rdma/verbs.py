"""Engine messages about memory of other processes. Bytes travel in them only where there is no better way."""

import msgspec

from monarch_nb.rdma.place import Place
from monarch_nb.rdma.traffic import Report
from monarch_nb.rdma.wire import Key
from monarch_nb.wire import Lane, Verb


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """How it went: "done", "dropped" (nothing is on offer any more), "refused", or "lost" (nobody answers)."""

    how: str
    text: str = ""
    data: bytes = b""  # what was read


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """Asks for bytes of a buffer."""

    number: int
    secret: bytes
    offset: int
    size: int


class Writing(msgspec.Struct, array_like=True, frozen=True):
    """Bytes to be written into a buffer."""

    number: int
    secret: bytes
    offset: int
    data: bytes


class Atomic(msgspec.Struct, array_like=True, frozen=True):
    """Changes 8 bytes of a buffer and asks for what they were: adds `operand`, or sets it where they are `expected`."""

    number: int
    secret: bytes
    offset: int
    operand: int
    expected: int | None = None


class Drop(msgspec.Struct, array_like=True, frozen=True):
    """Ends the offer of a buffer."""

    number: int
    secret: bytes


class Dial(msgspec.Struct, array_like=True, frozen=True):
    """Asks where streams to a process may be opened."""

    place: Place  # the asker's
    plain: bool = False  # whether the asker lets streams to other machines be unencrypted


class Listening(msgspec.Struct, array_like=True, frozen=True):
    """Where a process listens for streams, and with which key."""

    addresses: tuple[tuple[str, int], ...]
    key: Key


class WhereIs(msgspec.Struct, array_like=True, frozen=True):
    """Asks the process that has put a value where it lies on the asker's host."""

    number: int
    token: bytes
    place: Place  # the asker's
    missing: bool = False  # whether nothing was found where the asker was told to look, or it has waited in vain


class Where(msgspec.Struct, array_like=True, frozen=True):
    """Where a value lies: "there", "fetch" (nowhere yet: the asker fetches it for its host), "dropped"."""

    how: str
    pid: int = 0
    descriptor: int = -1


class Holds(msgspec.Struct, array_like=True, frozen=True):
    """The sender has fetched a value for its host."""

    number: int
    place: Place
    descriptor: int


class Forget(msgspec.Struct, array_like=True, frozen=True):
    """A value was dropped by the process that had put it."""

    token: bytes


class Leasing(msgspec.Struct, array_like=True, frozen=True):
    """Asks for the use of buffers by an RDMA device: their numbers and secrets."""

    regions: tuple[tuple[int, bytes], ...]
    write: bool
    asked_for: bool = False  # whether the asker's settings name this way, so that it is taken without a device, too


class Leased(msgspec.Struct, array_like=True, frozen=True):
    """How that went, as in `Outcome`, for which of the buffers; and, if it is "done", how to reach them."""

    how: str
    text: str = ""
    place: int = 0  # of the buffer that it is about, in the question
    lease: int = 0
    agent: str = ""
    words: bytes = b""  # for the asker's NIXL agent


class Renewing(msgspec.Struct, array_like=True, frozen=True):
    """The sender still uses what it has leased."""

    lease: int


class Releasing(msgspec.Struct, array_like=True, frozen=True):
    """The sender uses it no longer."""

    lease: int


READ = Verb("rdma.read", Reading, Outcome, doc="the bytes of a buffer, where no better way leads to it", lane=Lane.DATA)
WRITE = Verb("rdma.write", Writing, Outcome, doc="bytes for a buffer, where no better way leads to it", lane=Lane.DATA)
ATOMIC = Verb("rdma.atomic", Atomic, Outcome, doc="adds to, or swaps, 8 bytes of a buffer")
DROP = Verb("rdma.drop", Drop, Outcome, doc="a buffer is not needed any more")
DIAL = Verb("rdma.dial", Dial, Listening, doc="at which address do you accept streams?")
LEASE = Verb("rdma.lease", Leasing, Leased, doc="may I reach these buffers by the RDMA devices?")
RENEW = Verb("rdma.renew", Renewing, Outcome, doc="I still move bytes of what I have leased")
RELEASE = Verb("rdma.release", Releasing, doc="I move no more bytes of what I have leased")
WHERE = Verb("rdma.where", WhereIs, Where, doc="where is a value that you have put stored on my host?")
HOLDS = Verb("rdma.holds", Holds, doc="I have fetched a value of yours for my host")
FORGET = Verb("rdma.forget", Forget, doc="a value of mine that you hold was dropped")
MOVED = Verb("rdma.moved", Report, doc="what has moved between my memory and that of others", lane=Lane.DATA)
