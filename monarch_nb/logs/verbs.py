"""Engine messages about the output of procs, between a host agent and subscribers."""

import msgspec

from monarch_nb.wire import Done, Lane, Verb


class Follow(msgspec.Struct, frozen=True):
    """agent.tail: starts (or stops) streaming the output of procs from byte `offset` on; -1 is from now on."""

    addresses: tuple[str, ...]
    on: bool = True
    offset: int = 0


class LogBlock(msgspec.Struct, array_like=True, frozen=True):
    """Output of one kind. Lines may continue in the next block of the same stream and call."""

    stream: int  # 1 stdout, 2 stderr, 3 a display, of which `data` is the whole
    level: int  # of records of `logging`, 0 for other text
    at: float  # wall clock, seconds
    call: str  # that wrote it, "" for none; "?" if unknown to the proc (C code, child processes)
    data: bytes


class LogChunk(msgspec.Struct, array_like=True, frozen=True):
    """Output of a proc, from byte `offset` of all its output on.

    `position` is the position of its log after the chunk, see Header.log. `skipped` earlier lines were not sent, since
    the receiver had not acknowledged enough; they are in the log file. `ended`: no more output follows.
    """

    address: str
    offset: int
    position: int
    blocks: tuple[LogBlock, ...]
    skipped: int = 0
    ended: bool = False

    @property
    def data(self) -> bytes:
        """The bytes of all blocks."""
        return b"".join(block.data for block in self.blocks)


class LogChunks(msgspec.Struct, array_like=True, frozen=True):
    """proc.log: output of procs of one host; chunks of the same proc are in order."""

    chunks: tuple[LogChunk, ...]


class Took(msgspec.Struct, frozen=True):
    """agent.took: numbers of bytes of each proc's output that the sender has received by now; more may be sent then."""

    bytes: dict[str, int]


TAIL = Verb("agent.tail", Follow, Done, doc="sends the sender the output of procs, or no longer")
TOOK = Verb("agent.took", Took, doc="how much output the sender has received")
PROC_LOG = Verb("proc.log", LogChunks, doc="what procs wrote", lane=Lane.DATA)
