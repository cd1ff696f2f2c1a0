"""Comms of views: messages out from any thread, messages in on a thread of their own, also while a cell blocks."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..jupyter import obey_subshells

Message = dict[str, Any]
TARGET = "monarch_nb.cluster"
DIVIDED = ("snapshot", "delta", "logs", "metrics", "reply")  # if they are too large for one message
logger = logging.getLogger(__name__)
Size = Callable[[object], int]
LARGEST = 4 << 20  # bytes of one message
LONGEST = 1 << 20  # characters of one line in it


def pieces(message: Message, size: Size, most: int = LARGEST) -> Iterator[Message]:
    """Messages of at most about `most` bytes, measured by `size`, that together have the same content."""
    match message["type"]:
        case "snapshot":
            first, *rest = _patches(message["state"], size, most)
            yield {**message, "state": first}
            yield from _after(message, rest)
        case "delta":
            first, *rest = _patches(message["patch"], size, most)
            yield {**message, "patch": first}
            yield from _after(message, rest)
        case "logs":
            yield from _lines(message, size, most)
        case "metrics":
            yield from _points(message, size, most)
        case "reply":
            text = f"the answer has {size(message) >> 20} MB, which is more than a page is sent: ask for fewer ranks"
            yield {"type": "reply", "id": message.get("id"), "ok": False, "error": text}
        case _:
            yield message


def _after(message: Message, patches: list[Message]) -> Iterator[Message]:
    """Splits patches that do not fit into the first message into further changes with the same number."""
    seq = message["seq"]
    for patch in patches:
        yield {"type": "delta", "prev": seq, "seq": seq, "patch": patch, "now": message["now"]}


def _patches(document: Message, size: Size, most: int) -> list[Message]:
    """Merge patches, at least one, that are equal to a merge patch or a document if they are applied in turn."""
    patches: list[Message] = [{}]
    filled = 0
    for path, value, weight in _leaves((), document, size, max(1, most // 8)):
        if filled and filled + weight > most:
            patches.append({})
            filled = 0
        filled += weight
        into = patches[-1]
        for key in path[:-1]:
            into = into.setdefault(key, {})
        into[path[-1]] = value
    return patches


def _leaves(path: tuple[str, ...], value: Any, size: Size, most: int) -> Iterator[tuple[tuple[str, ...], Any, int]]:
    """Parts of a nested mapping, none above `most` bytes if it can be divided."""
    weight = size(value)
    if path and (weight <= most or not isinstance(value, dict) or not value):
        yield path, value, weight + sum(map(len, path))
        return
    for key, inner in value.items():
        yield from _leaves((*path, key), inner, size, most)


def _lines(message: Message, size: Size, most: int) -> Iterator[Message]:
    rest = {name: message[name] for name in ("type", "id")}
    run: list[object] = []
    filled = 0
    first = message
    for index, time, level, text in message["lines"]:
        line = (index, time, level, text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)")
        weight = size(line)
        if run and filled + weight > most:
            yield {**first, "lines": run}
            first, run, filled = rest, [], 0
        run.append(line)
        filled += weight
    yield {**first, "lines": run}


def _points(message: Message, size: Size, most: int) -> Iterator[Message]:
    first, rest = message, {name: message[name] for name in ("type", "id")}
    for name, points in message["points"].items():
        share = max(1, len(points) * most // max(most, size(points)))
        for begin in range(0, len(points), share):
            yield {**first, "points": {name: points[begin : begin + share]}}
            first = rest


class ViewChannel:
    """The way to one view, over a comm. `custom` wraps messages as widgets do for all but changes of their traits."""

    def __init__(self, kernel: Any, comm: Any, *, custom: bool = False) -> None:
        self._kernel = kernel
        self.comm = comm
        self._custom = custom
        self._sent = 0
        self._sending = threading.Lock()  # messages are sent in the order of their counts
        obey_subshells(comm)

    def send(self, message: Message) -> None:
        """Sends from any thread. Not through the comm, which has the cell and the subshell of the thread.

        A view counts the messages that it receives: a message "alive" says how many others were sent before it.
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
        """Returns the content as JSON, whose message is encoded once for all views; None if it must be packed."""
        body = _encoded(message)
        if body is None:
            return None
        data = b'{"method":"custom","content":%b}' % body if self._custom else body
        return b'{"comm_id":"%b","data":%b}' % (comm_id.encode(), data)


_last: tuple[Message | None, bytes | None] = (None, None)


def _encoded(message: Message) -> bytes | None:
    global _last
    last, body = _last
    if last is not message:
        try:
            body = msgspec.json.encode(message)
        except (TypeError, ValueError):  # such as text with lone surrogates, which Jupyter's own packer takes
            body = None
        _last = (message, body)
    return body


class ViewInbox:
    """Queue of messages of views, handled one after the other on its own thread: comm handlers run on any subshell."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Queues work."""
        self._queue.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-views", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after the queued work."""
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
