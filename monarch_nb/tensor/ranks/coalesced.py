"""Operations that are sent together: `coalescing`."""

import contextlib
from collections.abc import Iterator

from monarch_nb.tensor.lanes import ACTIVE
from monarch_nb.tensor.stream import Stream


@contextlib.contextmanager
def coalescing() -> Iterator[None]:
    """Sends what this thread issues in a `with` block at its end, in one message. Values cannot be fetched meanwhile.

    What does not fit into one, such as a large tensor of the program, goes out before.
    """
    if ACTIVE.coalesced is not None:
        yield
        return
    streams: set[Stream] = set()
    ACTIVE.coalesced = streams
    try:
        yield
    finally:
        ACTIVE.coalesced = None
        for stream in streams:
            stream.coalesces = False
        for stream in streams:
            stream.flush()
