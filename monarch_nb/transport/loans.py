"""Memory files on loan: lent with a message, given back once its receiver has let go of them, and filled again."""

import contextlib
from collections import deque
from collections.abc import Callable

import msgspec

from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.pool import Pool
from monarch_nb.transport.reader import Reader
from monarch_nb.wire import msgpack_decoder
from monarch_nb.wire.header import Header, Kind

__all__ = ["Loans"]

_numbers = msgpack_decoder(list[int])


class Loans:
    """What one process has lent, and what it has borrowed. Any thread."""

    def __init__(self, address: str, pool: Pool, reader: Reader, send: Callable[[Header, Parcel], None]) -> None:
        """`send` may raise TransportError: nobody is there then to use the files again."""
        self._address, self._pool, self._reader, self._send = address, pool, reader, send
        self._back: deque[tuple[str, int]] = deque()

    def lend(self, parcel: Parcel, to: str) -> int:
        """A number for the loan of a message's memory files to `to`; 0 if they are for good."""
        return self._pool.lend(parcel.bodies, to)

    def returned(self, header: Header, parcel: Parcel) -> None:
        """A GIVEN_BACK message."""
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            self._pool.returned(_numbers.decode(parcel.frames[0]), header.src)

    def give_back(self, to: str, number: int) -> None:
        """A loan of `to` is not needed any more; it hears of it soon. Also in a finalizer."""
        self._back.append((to, number))
        self._reader.sometime(self._send_back)

    def _send_back(self) -> None:
        loans: dict[str, list[int]] = {}
        while self._back:
            to, number = self._back.popleft()
            loans.setdefault(to, []).append(number)
        for to, numbers in loans.items():
            with contextlib.suppress(TransportError):
                body = Parcel([msgspec.msgpack.encode(numbers)])
                self._send(Header(Kind.GIVEN_BACK, to, self._address), body)
