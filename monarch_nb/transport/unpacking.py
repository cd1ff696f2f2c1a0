"""From what a link delivers to messages."""

import struct
from collections import deque
from collections.abc import Callable

import msgspec

from monarch_nb.routing.actions import PREFIX_SIZE, PrefixKind
from monarch_nb.transport.chunks import Assembly
from monarch_nb.transport.envelope import Item, attach, unpack
from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.pool import Loan
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire.header import Header

_CHUNK = int(PrefixKind.CHUNK)
_Nonsense = (msgspec.MsgspecError, struct.error, TypeError, ValueError, IndexError, OverflowError)


class Unpacker:
    """Turns one peer's items into messages: opens memory files, puts pieces together."""

    def __init__(self, *, portable: bool, back: Callable[[int], None]) -> None:
        """`back` gives a loan of the peer's back; any thread."""
        self.ready: deque[tuple[Header, Parcel, int, int]] = deque()  # with charge and incarnation to give back to
        self.refused: deque[tuple[Header | None, str, int, int]] = deque()  # None: not even a header
        self._portable = portable
        self._back = back
        self._assembly: Assembly | None = None

    def take(self, item: Item, charge: int, incarnation: int) -> None:
        """The next item in order. Called before the link can acknowledge it. Raises nothing."""
        header: Header | None = None
        try:
            if item.head[0] == _CHUNK:
                self._piece(item)
                return
            self.broken()
            header, hops, chunked = unpack(item.head, PREFIX_SIZE)
            if chunked:
                self._assembly = Assembly(header, hops, item.frames[0], portable=self._portable)
                self._assembly.charge, self._assembly.incarnation = charge, incarnation
                self._finish()
            elif header.buffers:
                self.ready.append((header, self._attached(header, item, hops), charge, incarnation))
            else:
                self.ready.append((header, Parcel(item.frames, hops=hops), charge, incarnation))
        except _Nonsense as error:
            self.refused.append((None, f"{type(error).__name__}: {error}", charge, incarnation))
        except (TransportError, MemoryError) as error:
            self.refused.append((header, str(error) or "out of memory", charge, incarnation))

    def _attached(self, header: Header, item: Item, hops: int) -> Parcel:
        loan = Loan(header.loan, self._back)  # given back at once if the files cannot be opened
        header.loan = 0
        bodies = attach(header, item.frames)
        for body in bodies:
            if type(body) is MemoryFile:
                body.loan = loan
        return Parcel(bodies, hops=hops)

    def _piece(self, item: Item) -> None:
        assembly = self._assembly
        if assembly is None:  # the rest of one that was given up
            return
        try:
            for piece in item.frames:
                assembly.add(memoryview(piece))
            self._finish()
        except _Nonsense as error:
            self._assembly = None
            self.refused.append((None, f"{type(error).__name__}: {error}", assembly.charge, assembly.incarnation))
        except (TransportError, MemoryError) as error:
            self._assembly = None
            self.refused.append((assembly.header, str(error) or "out of memory", assembly.charge, assembly.incarnation))

    def _finish(self) -> None:
        assembly = self._assembly
        if assembly is not None and assembly.complete:
            self._assembly = None
            self.ready.append((assembly.header, assembly.parcel(), assembly.charge, assembly.incarnation))

    def broken(self) -> None:
        """Pieces of the message in assembly will never come; its sender knows."""
        assembly, self._assembly = self._assembly, None
        if assembly is not None:
            self.refused.append((None, "the rest of a large message never came", assembly.charge, assembly.incarnation))
