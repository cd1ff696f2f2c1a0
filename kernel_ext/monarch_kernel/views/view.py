"""One view: what it watches and what it asks for, as docs/protocol.md has it."""

import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_nb._about import __version__
from monarch_nb.runtime import Runtime
from monarch_nb.store import store_of
from monarch_nb.wire import text_of

from .channel import Message
from .live import LiveViews, Watch
from .requests import Requests

PROTOCOL = 1


class View:
    """Speaks with one front end. Its methods are called on one thread, `send` from any."""

    def __init__(self, send: Callable[[Message], None], requests: Requests, views: LiveViews) -> None:
        self._send = send
        self._views = views
        self._requests = requests
        self._engine: Runtime | None = None
        self._cluster: Any = None  # ends the watch
        self._listening: Any = None
        self._watches: dict[str, Message] = {}  # what is watched, for an engine that comes later
        self._ends: dict[str, Callable[[], None]] = {}
        self._titled: list[dict[str, str]] = []  # what it was told of views with a section of their own
        self._alive = time.monotonic()

    def attach(self, engine: Runtime | None) -> None:
        """Speaks of this engine from now on; what was watched is watched there."""
        if engine is self._engine and engine is not None:
            return
        self._leave()
        self._engine = engine
        if engine is not None:
            hello = {"type": "hello", "protocol": PROTOCOL, "version": __version__, "engine": engine.address}
            self._send({**hello, "now": time.time()})
            self.name_views()
            for message in tuple(self._watches.values()):
                self._watch(message)

    def name_views(self) -> None:
        """Tells the panel which sections to add for views that are not its own, or no longer."""
        titled = [{"name": view.name, "title": view.title} for view in self._views if view.title]
        if self._engine is not None and titled != self._titled:
            self._titled = titled
            self._send({"type": "views", "views": titled})

    def close(self) -> None:
        """The front end is gone."""
        self._leave()
        self._watches.clear()
        self._engine = None

    def _leave(self) -> None:
        if self._cluster is not None:
            self._cluster()
            self._cluster = None
        for end in self._ends.values():
            end()
        self._ends.clear()

    def receive(self, message: Message) -> None:
        """Takes what the front end sent."""
        kind = message.get("type")
        if kind == "watch":
            key = self._key(message)
            self._watches[key] = message
            self._watch(message)
        elif kind == "unwatch":
            key = self._key(message)
            self._watches.pop(key, None)
            if key == "cluster" and self._cluster is not None:
                self._cluster()
                self._cluster = None
            elif key in self._ends:
                self._ends.pop(key)()
        elif kind == "alive":
            self._alive = time.monotonic()
            if not self._cluster and "cluster" in self._watches:
                self._watch(self._watches["cluster"])
        elif kind == "request":
            threading.Thread(target=self._answer, args=(message,), name="monarch-request", daemon=True).start()

    @staticmethod
    def _key(message: Message) -> str:
        return "cluster" if message.get("topic") == "cluster" else str(message.get("id"))

    def _watch(self, message: Message) -> None:
        engine = self._engine
        if engine is None:
            return
        topic = message.get("topic")
        if topic == "cluster":
            store = store_of(engine)
            if self._cluster is not None:
                store.again(self._listening)
            else:
                self._listening = self._send
                self._cluster = store.watch(self._listening)
            return
        key = self._key(message)
        if key in self._ends:
            self._ends.pop(key)()
        view = self._views.get(str(topic))
        if view is not None and view.feed is not None:
            self._ends[key] = view.feed(Watch(engine, self._send, message, self._requests.name))

    def _answer(self, message: Message) -> None:
        reply: Message = {"type": "reply", "id": message.get("id")}
        try:
            engine = self._engine
            if engine is None:
                raise RuntimeError("the cluster was shut down; the next cell that uses it starts a new one")
            result = self._requests.answer(engine, message)
            self._send({**reply, "ok": True, "result": result})
        except Exception as error:
            self._send({**reply, "ok": False, "error": text_of(error) or type(error).__name__})
