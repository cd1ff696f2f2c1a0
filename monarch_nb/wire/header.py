"""The header of every message: small, flat, encoded by msgspec, readable without unpickling anything."""

from enum import IntEnum, IntFlag

import msgspec

from monarch_nb.wire.address import proc_address
from monarch_nb.wire.plain import decode_plain, msgpack_decoder


class Kind(IntEnum):
    """The kind of a message."""

    CALL = 1  # run an endpoint of one actor
    REPLY = 2  # the answer to a CALL, to a port
    CAST = 3  # a CALL for many actors, to be spread by host agents
    FOLDED = 4  # several REPLYs in one message, folded by a host agent
    PORT = 5  # a value for a port that a program has opened
    CONTROL = 6  # engine to engine; the body is msgspec, never a pickle
    RETURNED = 7  # an undeliverable message on its return to its sender's process
    GIVEN_BACK = 8  # between neighbours: loans of memory files; the body is their numbers


class Status(IntEnum):
    """The content of a REPLY."""

    VALUE = 0
    EXCEPTION = 1  # the endpoint raised: an ordinary error for the caller
    FAILURE = 2  # the actor or its process is gone: a supervision error for the caller


class Flags(IntFlag):
    """Further properties of a message, in `Header.flags`. A test costs a microsecond: not for hot paths."""

    REPORTED_ELSEWHERE = 1  # a RETURNED whose caller learns of the end by watching the process
    JUDGING = 2  # sent while its sender judged a lost message; is not judged itself
    UNRETURNED = 4  # a PORT message that may be lost
    TO_ENGINES = 8  # a CAST of a CONTROL message, not of a CALL; its receivers answer with a REPLY


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """The hosts of one proc mesh: rank r is on hosts[r // per_host]."""

    uid: str
    hosts: tuple[str, ...]
    per_host: int

    @property
    def size(self) -> int:
        """The number of procs."""
        return len(self.hosts) * self.per_host

    def host_of(self, rank: int) -> str:
        """Returns the id of the host on which `rank` lives."""
        return self.hosts[rank // self.per_host]

    def ranks_on(self, host: str) -> range:
        """Returns the ranks that live on a host, if any."""
        if host not in self.hosts:
            return range(0)
        first = self.hosts.index(host) * self.per_host
        return range(first, first + self.per_host)

    def address(self, rank: int, incarnation: int = 0) -> str:
        """Returns the process address of one rank in one of its incarnations."""
        return proc_address(self.host_of(rank), self.uid, rank, incarnation)


class Run(msgspec.Struct, array_like=True, frozen=True):
    """`count` ranks from `rank` in steps of `stride` that share both incarnations and their next number.

    `index` is the index of the first one in the region that the message was sent to; indices step by `index_stride`.
    """

    rank: int
    count: int
    stride: int = 1
    proc_incarnation: int = 0
    incarnation: int = 0
    seq: int = -1
    index: int = 0
    index_stride: int = 1


class CastPlan(msgspec.Struct, array_like=True, frozen=True):
    """One cast for a host agent: its runs of ranks, and its place in the tree of agents.

    It names the hosts of its own subtree alone: its cost for an agent does not grow with the mesh.
    """

    uid: str  # of the proc mesh
    per_host: int
    runs: tuple[Run, ...]
    hosts: tuple[int, ...] = ()  # numbers, in the layout of the mesh, of the hosts with any of the ranks, in order
    names: tuple[str, ...] = ()  # their ids; the first one's agent is the head
    fanout: int = 8

    @property
    def head(self) -> str:
        """The host whose agent spreads the cast."""
        return self.names[0]


MOST_NAMED = 8  # of unread calls in a header; if that many, all between the last one and the message's own are unread
SKIP = "__skip__"  # method of a CALL or CAST that replaces a numbered one that was lost


class Header(msgspec.Struct, array_like=True, gc=False):
    """The destination and kind of a message; the body follows in frames of its own."""

    kind: int
    dst: str  # process address
    src: str  # process address
    mesh: str = ""  # uid of the receiving actor mesh; "" is the process itself
    rank: int = 0  # receiving actor's rank in that mesh
    incarnation: int = 0  # of the receiving actor
    sender: str = ""  # stream: the sending actor instance
    seq: int = -1  # number in the stream from sender to this actor incarnation; -1 is unordered
    method: str = ""  # endpoint, or the CONTROL verb
    port: int = 0  # reply port in the src process; in REPLY/PORT/FOLDED: the port meant at dst; 0 is nobody
    index: int = 0  # place in the region the message was sent to; a REPLY echoes it
    extent: tuple[tuple[str, ...], tuple[int, ...]] | None = None  # of that region
    status: int = 0
    call: str = ""  # id of the outermost call: for logs, deadlocks
    chain: tuple[str, ...] = ()  # calls that wait for this one, outermost first
    log: int = 0  # REPLY: position of the process's log when the endpoint returned
    plan: CastPlan | None = None
    buffers: tuple[tuple[int, ...], ...] = ()  # (pid, fd, length, …) of bodies in files, after the frames
    flags: int = 0  # of `Flags`
    actor: str = ""  # display name of the sender, for errors
    trace: str = ""  # W3C traceparent of the span of the send, where spans are recorded
    loan: int = 0  # of the memory files in `buffers`, to be returned; 0: given for good
    # CALL, CAST: its number among its controller's calls of the mesh, and those of earlier ones whose results are
    # unread: replies are stored until a later message does not name the call. Empty if they need not be.
    unread: tuple[int, ...] = ()


_MOST_RANKS = 1 << 24

_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Header)


def encode_header(header: Header) -> bytes:
    """Returns the header as bytes."""
    return _encoder.encode(header)


def decode_header(data: bytes | memoryview) -> Header:
    """Returns the header of some bytes. Raises msgspec.DecodeError on other bytes."""
    header = decode_plain(data, _decoder)
    if header.plan is not None:
        _check(header.plan)
    return header


def _check(plan: CastPlan) -> None:
    """Rejects plans in which a few bytes describe more ranks than possible, since all are visited."""
    counts = [run.count for run in plan.runs]
    most = min(_MOST_RANKS, len(plan.hosts) * plan.per_host)
    if plan.per_host < 1 or min(counts, default=0) < 0 or sum(counts) > most:
        raise msgspec.ValidationError("a cast to more ranks than its hosts have")
    if not plan.hosts or len(plan.hosts) != len(plan.names) or min(plan.hosts) < 0:
        raise msgspec.ValidationError("a cast by way of hosts without names")
