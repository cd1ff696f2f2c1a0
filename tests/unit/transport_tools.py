"""Nodes with an inbox, for the transport's tests."""

import os
import queue
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_nb.transport import Node, Parcel
from monarch_nb.wire.header import Header, Kind
from tests.polling import until


@contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder with a short path (pytest's are too long for sockets)."""
    folder = Path(tempfile.mkdtemp(prefix="mnb-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class End:
    """A started node; what arrives can be waited for."""

    def __init__(
        self, address: str, folder: Path | dict[str, Path] | None = None, *, consume: bool = True, **options: Any
    ) -> None:
        host = address.split("/")[0]
        folders = folder if isinstance(folder, dict) else {host: folder} if folder else {}
        self.inbox: queue.SimpleQueue[tuple[Header, Parcel]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[tuple[Header, Parcel, str]] = queue.SimpleQueue()
        self.connections: queue.SimpleQueue[tuple[str, bool, str]] = queue.SimpleQueue()
        self._consume = consume
        self.node = Node(
            address,
            run_folders=folders,
            handler=self._take,
            on_link_failed=lambda header, parcel, reason: self.failed.put((header, parcel, reason)),
            on_connection=lambda address, up, reason: self.connections.put((address, up, reason)),
            **options,
        )
        self.node.start()

    def _take(self, header: Header, parcel: Parcel) -> None:
        self.inbox.put((header, parcel))
        if self._consume:
            self.node.consumed(parcel)

    def send(self, dst: str, *frames: Any, kind: Kind = Kind.CALL, lane: int = 0, **fields: Any) -> None:
        header = Header(kind, dst, self.node.address, **fields)
        self.node.send(header, self.node.snapshot(frames or [b""]), lane=lane)

    def get(self, timeout: float = 20) -> tuple[Header, list[Any]]:
        header, parcel = self.inbox.get(timeout=timeout)
        return header, parcel.frames

    def get_connection(self, up: bool, timeout: float = 20) -> str:
        while True:
            address, is_up, _ = self.connections.get(timeout=timeout)
            if is_up == up:
                return address


@contextmanager
def ends(*nodes: End) -> Iterator[None]:
    """Close the nodes at the end."""
    try:
        yield
    finally:
        for end in nodes:
            end.node.close(0.2)


def settled(*nodes: End) -> None:
    """Wait until all their messages are acknowledged: a node that closes earlier reports a loss."""
    until(lambda: all(end.node._links.settled for end in nodes))


def reader_threads() -> list[str]:
    """Threads of nodes of these tests; a controller of other tests has its own."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("monarch-nb-")]
    return [name for name in names if "." not in name]


@contextmanager
def starved(leaving: int) -> Iterator[None]:
    """This process can open only so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    highest = max(map(int, os.listdir("/dev/fd")))  # there may be many between the two
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 64), hard))
    descriptors = [lowest]
    try:
        while True:
            try:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(leaving):
            os.close(descriptors.pop())
        yield
    finally:
        for fd in descriptors:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
