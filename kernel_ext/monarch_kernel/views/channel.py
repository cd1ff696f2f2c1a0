"""Comms of views: messages out from any thread, messages in on a thread of their own, also while a cell blocks."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ..jupyter import obey_subshells
from .pieces import LARGEST, pieces

Message = dict[str, Any]
TARGET = "monarch_nb.cluster"
DIVIDED = ("snapshot", "delta", "logs", "metrics", "reply")  # where there is too much for one message
logger = logging.getLogger(__name__)


class Channel:
    """The way to one view, over a comm. `custom` is how widgets wrap what is not a change of their traits."""

    def __init__(self, kernel: Any, comm: Any, *, custom: bool = False) -> None:
        self._kernel = kernel
        self.comm = comm
        self._custom = custom
        self._sent = 0
        self._sending = threading.Lock()  # what is counted first is sent first
        obey_subshells(comm)

    def send(self, message: Message) -> None:
        """Sends from any thread. Not through the comm: there the cell, and the subshell, are those of the thread.

        A view counts what it hears: a message "alive" says how many others were sent before it.
        """
        with self._sending:
            if message["type"] == "alive":
                self._send({**message, "sent": self._sent})
                return
            body = _encoded(message) if message["type"] in DIVIDED else None
            if body is None or len(body) <= LARGEST:
                self._send(message)
                return
            for piece in pieces(message, lambda part: len(msgspec.json.encode(part))):
                self._send(piece)

    def _send(self, message: Message) -> None:
        if self._kernel is None:  # marimo's comms know their page, on any thread
            self.comm.send({"method": "custom", "content": message} if self._custom else message)
            self._sent += message["type"] != "alive"
            return
        comm_id = self.comm.comm_id
        content: Any = self._packed(comm_id, message) if message["type"] in DIVIDED else None
        if content is None:
            data = {"method": "custom", "content": message} if self._custom else message
            content = {"comm_id": comm_id, "data": data}
        kernel = self._kernel
        kernel.session.send(
            kernel.iopub_socket, "comm_msg", content, metadata={}, parent={}, ident=f"comm-{comm_id}".encode()
        )
        self._sent += message["type"] != "alive"

    def _packed(self, comm_id: str, message: Message) -> bytes | None:
        """The content as JSON, of which the message itself is encoded once for all views; None if it must be packed."""
        body = _encoded(message)
        if body is None:
            return None
        data = b'{"method":"custom","content":%b}' % body if self._custom else body
        return b'{"comm_id":"%b","data":%b}' % (comm_id.encode(), data)


_last: tuple[Message | None, bytes | None] = (None, None)


def _encoded(message: Message) -> bytes | None:
    global _last
    known, body = _last
    if known is not message:
        try:
            body = msgspec.json.encode(message)
        except (TypeError, ValueError):  # such as text with halves of characters, which Jupyter's own packer takes
            body = None
        _last = (message, body)
    return body


class Inbox:
    """What views send, handled one after the other on a thread of its own: handlers may be called on any subshell."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Has it done soon."""
        self._queue.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-views", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after what is there."""
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("a message of a view could not be handled")
