"""Streaming what procs write: their output goes to files, and this thread sends on what is new to who subscribed.

A thread of its own, because it sends on the data lane: a slow subscriber may block it, and must block nothing else.
"""

import os
import select
import socket
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from monarch_nb.host.linux import watch_folder
from monarch_nb.host.post import DATA, Post
from monarch_nb.host.protocol import LogChunk

CHUNK = 64 * 1024
_POLL_S = 0.02  # where files cannot be watched


@dataclass
class _Tail:
    path: str
    offset: int
    last: bool = False  # the proc has ended: send the rest, then no more


class LogTailer(threading.Thread):
    """`follow`, `leave` and `ended` may be called from any thread and never block."""

    def __init__(self, post: Post, folder: Path) -> None:
        super().__init__(name="monarch-logs", daemon=True)
        self._post = post
        self._folder = folder
        self._tails: dict[tuple[str, str], _Tail] = {}
        self._requests: deque[tuple[str, str, _Tail | None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._launched = False

    def follow(self, address: str, subscriber: str, path: str, offset: int) -> None:
        """Send a proc's output from byte `offset` on; -1 is from now on."""
        start = os.stat(path).st_size if offset < 0 and os.path.exists(path) else max(0, offset)
        self._ask(address, subscriber, _Tail(path, start))

    def leave(self, address: str, subscriber: str) -> None:
        """No more of this to that subscriber."""
        self._ask(address, subscriber, None)

    def ended(self, address: str) -> None:
        """A proc has ended: what it wrote last goes out, then its tails are dropped."""
        if self._launched:
            self._ask(address, "*", None)

    def _ask(self, address: str, subscriber: str, tail: _Tail | None) -> None:
        self._requests.append((address, subscriber, tail))
        if not self._launched:
            self._launched = True
            self.start()
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            pass

    def run(self) -> None:
        """Work until the process ends."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        inotify = watch_folder(str(self._folder))
        if inotify is not None:
            poller.register(inotify, select.POLLIN)
        while True:
            for fd, _ in poller.poll(_POLL_S * 1000 if inotify is None and self._tails else None):
                try:
                    os.read(fd, 65536)
                except BlockingIOError:
                    pass
            self._take_requests()
            while self._send_round():
                self._take_requests()

    def _take_requests(self) -> None:
        while self._requests:
            address, subscriber, tail = self._requests.popleft()
            if subscriber == "*":
                for key in [key for key in self._tails if key[0] == address]:
                    self._tails[key].last = True
            elif tail is None:
                self._tails.pop((address, subscriber), None)
            else:
                self._tails[address, subscriber] = tail

    def _send_round(self) -> bool:
        """Send each tail's next chunk; says whether there may be more."""
        more = False
        for (address, subscriber), tail in list(self._tails.items()):
            data = _read(tail.path, tail.offset)
            if data:
                chunk = LogChunk(address, tail.offset, data)
                if not self._post.tell(subscriber, "proc.log", chunk, lane=DATA):
                    del self._tails[address, subscriber]
                    continue
                tail.offset += len(data)
                more = more or len(data) == CHUNK or tail.last
            elif tail.last:
                del self._tails[address, subscriber]
        return more


def _read(path: str, offset: int) -> bytes:
    try:
        if os.stat(path).st_size <= offset:
            return b""
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(CHUNK) or b""
    except OSError:
        return b""
