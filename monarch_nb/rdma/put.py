"""`put`: a value shared by many calls, written once on each host and mapped by each process."""

import functools
import weakref
from typing import Generic, TypeVar

from monarch_nb.rdma.buffer import aside, service
from monarch_nb.rdma.errors import BufferDroppedError, Limit
from monarch_nb.rdma.puts import StoredValue, starts
from monarch_nb.runtime import Future, current_runtime, unretrieved
from monarch_nb.transport import SharedMemoryError
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire import Pieces, decode, encode

T = TypeVar("T")
_TIMEOUT_S = 60.0


class Put(Generic[T]):
    """A value that was put: send this object, and call `get()` where the value is needed.

    The value is a snapshot. `get()` gives a private copy: memory of tensors and arrays is shared by all processes of a
    host until a process writes to it. The value is stored while the process that put it has this object and its actor
    lives, and after that until `rdma_put_kept` bytes of newer such values are stored.
    """

    __slots__ = ("__weakref__", "_value")

    def __init__(self, stored: StoredValue) -> None:
        self._value = stored

    @property
    def owner(self) -> str:
        """The actor that put the value."""
        return self._value.handle.owner

    def size(self) -> int:
        """Returns the size of the encoded value in bytes."""
        return sum(self._value.sizes)

    def get(self, timeout: float = _TIMEOUT_S) -> T:
        """Returns the value. The first process of another host that requests it fetches it for all others there.

        Blocks. Raises BufferDroppedError, OwnerLostError or another RDMAError, and TimeoutError.
        """
        local = service().puts.local_file(self._value)
        return self._decoded(local) if local is not None else self.fetch(timeout).get()

    def fetch(self, timeout: float = _TIMEOUT_S) -> Future[T]:
        """As `get`; returns a future to `await` in an actor with an event loop."""
        puts = service().puts
        return aside(lambda limit: self._decoded(puts.fetch(self._value, limit)), Limit(timeout, "fetching", self))

    def drop(self) -> None:
        """Drops the value on all hosts; only in the process that put it. Values already obtained stay valid."""
        mine = service()
        if self._value.handle.process != mine.address:
            raise ValueError(f"{self!r} is dropped in the process that put it")
        mine.puts.drop(self._value.handle.number)

    def __repr__(self) -> str:
        return f"<Put {self._value.handle.number} of {self.owner}, {self.size():,} bytes>"

    def __getstate__(self) -> StoredValue:
        return self._value

    def __setstate__(self, stored: StoredValue) -> None:
        self._value = stored

    def _decoded(self, file: MemoryFile) -> T:
        try:
            memory = file.private()
        except SharedMemoryError as error:
            raise BufferDroppedError(f"{self!r} cannot be mapped: {error}") from error
        sizes = self._value.sizes
        first, *rest = (memory[start : start + size] for start, size in zip(starts(sizes), sizes, strict=True))
        value: T = decode([bytes(first), *rest], current_runtime())
        return value


def put(value: T) -> Put[T]:
    """Stores a value for all processes, instead of sending it with each call. Blocks while the value is copied once.

    Raises what pickling the value raises, and SharedMemoryError without memory for it.
    """
    runtime, mine = current_runtime(), service()
    frames = [frame if isinstance(frame, Pieces) else memoryview(frame).cast("B") for frame in encode(value, runtime)]
    handle: Put[T] = Put(mine.puts.store(frames, runtime.context().actor_instance))
    unretrieved.ready()
    release = functools.partial(mine.puts.release, handle._value.handle.number)
    weakref.finalize(handle, unretrieved.forget, release).atexit = False  # on another thread: this one may hold locks
    return handle
