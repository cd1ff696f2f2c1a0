"""A view: the topics that it watches and its requests, as docs/protocol.md describes them."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_nb._package import __version__
from monarch_nb.runtime import Runtime
from monarch_nb.store import store_of
from monarch_nb.wire import text_of

from .channel import Message
from .live import LiveViews, Watch
from .requests import Requests

logger = logging.getLogger(__name__)
PROTOCOL = 1
REMEMBERED = 64  # requests
# Pages send a sign of life every 30 s, those in the background once a minute. Messages to a closed page are stored by
# the notebook's server for its return, and count as activity for hubs that end idle servers.
SILENT_S = 180.0


class _Sections:
    """The sections of the state that a page has asked for; changes of others are not sent."""

    def __init__(self, send: Callable[[Message], None], sections: frozenset[str]) -> None:
        self._send = send
        self.sections = sections
        self._seq = 0

    def __call__(self, message: Message) -> None:
        name = "state" if message["type"] == "snapshot" else "patch"
        part = {section: value for section, value in message[name].items() if section in self.sections}
        if name == "state":
            self._send({**message, "state": part})
        elif part:
            self._send({**message, "prev": self._seq, "patch": part})
        else:
            return
        self._seq = message["seq"]


class View:
    """The connection to one front end. Its methods are called on one thread, `send` from any."""

    def __init__(
        self,
        send: Callable[[Message], None],
        requests: Requests,
        views: LiveViews,
        silent: Callable[[], None] = lambda: None,
    ) -> None:
        """`silent` is called, on any thread, when a message goes to a page that has long been silent."""
        self._out = send
        self._silent = silent
        self._last_seen = time.monotonic()
        self._views = views
        self._requests = requests
        self._runtime: Runtime | None = None
        self._cluster: Any = None  # ends the watch
        self._listening: Any = None
        self._watches: dict[str, Message] = {}  # watched topics, kept for the next runtime
        self._ends: dict[str, Callable[[], None]] = {}
        self._titled: list[dict[str, str]] = []  # views with a section of their own, as last sent
        self._answers: dict[str, Message | None] = {}  # requests, the latest last, with their answers

    def _send(self, message: Message) -> None:
        self._out(message)
        if time.monotonic() - self._last_seen > SILENT_S:
            self._silent()

    def mark_alive(self) -> None:
        """Records that the page is alive. From any thread."""
        self._last_seen = time.monotonic()

    def pause(self) -> None:
        """Stops sending watched topics until the next message of the page."""
        if time.monotonic() - self._last_seen > SILENT_S:
            self._leave()

    def attach(self, runtime: Runtime | None) -> None:
        """Switches to this runtime; watched topics are watched there."""
        if runtime is self._runtime and runtime is not None:
            return
        self._leave()
        self._runtime = runtime
        if runtime is not None:
            hello = {"type": "hello", "protocol": PROTOCOL, "version": __version__, "engine": runtime.address}
            self._send({**hello, "now": time.time()})
            self.name_views()
            for message in tuple(self._watches.values()):
                self._watch(message)

    def announce(self, message: Message) -> None:
        """Sends the page a message that is not part of the state."""
        if self._runtime is not None:
            self._send(message)

    def name_views(self) -> None:
        """Sends the panel the sections of custom views, if they have changed."""
        titled = [{"name": view.name, "title": view.title} for view in self._views if view.title]
        if self._runtime is not None and titled != self._titled:
            self._titled = titled
            self._send({"type": "views", "views": titled})

    def close(self) -> None:
        """Ends all watches: the front end has gone."""
        self._leave()
        self._watches.clear()
        self._runtime = None

    def _leave(self) -> None:
        if self._cluster is not None:
            self._cluster()
            self._cluster = None
        for end in self._ends.values():
            end()
        self._ends.clear()

    def receive(self, message: Message) -> None:
        """Handles a message of the front end."""
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
            for key, watch in tuple(self._watches.items()):
                if self._cluster is None if key == "cluster" else key not in self._ends:
                    self._watch(watch)
            self._send({"type": "alive"})
        elif kind == "request":
            self._request(message)

    def _request(self, message: Message) -> None:
        """Answers a request once: a view repeats it after a lost connection, and gets the stored answer."""
        key = message.get("id")
        if key in self._answers:
            if (answer := self._answers[key]) is not None:
                self._send(answer)
            return
        if isinstance(key, str):
            self._answers[key] = None
            while len(self._answers) > REMEMBERED:
                self._answers.pop(next(iter(self._answers)))
        threading.Thread(target=self._answer, args=(message,), name="monarch-request", daemon=True).start()

    @staticmethod
    def _key(message: Message) -> str:
        return "cluster" if message.get("topic") == "cluster" else str(message.get("id"))

    def _watch(self, message: Message) -> None:
        runtime = self._runtime
        if runtime is None:
            return
        topic = message.get("topic")
        if topic == "cluster":
            self._watch_cluster(runtime, message.get("sections"))
            return
        key = self._key(message)
        if key in self._ends:
            self._ends.pop(key)()
        view = self._views.get(str(topic))
        if view is not None and view.feed is not None:
            try:
                self._ends[key] = view.feed(Watch(runtime, self._send, message, self._requests.name))
            except Exception:  # of a mesh that has gone, perhaps: other topics, and signs of life, do not depend on it
                logger.warning("%s cannot be watched", topic, exc_info=True)

    def _watch_cluster(self, runtime: Runtime, names: object) -> None:
        sections = frozenset(map(str, names)) if isinstance(names, list) else None
        store, current = store_of(runtime), getattr(self._listening, "sections", None)
        if self._cluster is not None and current == sections != frozenset():
            store.resend(self._listening)
            return
        if self._cluster is not None:
            self._cluster()
        self._listening = self._send if sections is None else _Sections(self._send, sections)
        if sections != frozenset():
            self._cluster = store.watch(self._listening)
        else:  # a page that shows other topics needs a sign that the kernel answers
            self._cluster = lambda: None
            self._send({"type": "snapshot", "seq": 0, "state": {}, "now": round(time.time(), 3)})

    def _answer(self, message: Message) -> None:
        reply: Message = {"type": "reply", "id": message.get("id")}
        try:
            runtime = self._runtime
            if runtime is None:
                raise RuntimeError("the cluster was shut down; the next cell that uses it starts a new one")
            self._give({**reply, "ok": True, "result": self._requests.answer(runtime, message)})
        except Exception as error:
            self._give({**reply, "ok": False, "error": text_of(error) or type(error).__name__})

    def _give(self, answer: Message) -> None:
        if answer["id"] in self._answers:
            self._answers[answer["id"]] = answer
        self._send(answer)
