"""Noticing procs that live but do not answer: held by one long C call, stopped, or swapped out."""

import time

from monarch_nb.host.child import Child
from monarch_nb.host.children import Children
from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.post import Post
from monarch_nb.host.protocol import Pressed


class Pulse:
    """Pings every proc each `interval_s` on its leash, and tells its watchers after `patience_s` without an answer.

    The leash's thread in the proc needs the GIL as any other and nothing else, so it answers from the first moment on
    and does not care how busy the proc's links are. No procs, no wake-ups.
    """

    def __init__(self, loop: Loop, children: Children, post: Post, *, interval_s: float = 1.0, patience_s: float = 2.0,
                 ) -> None:  # fmt: skip
        self._loop = loop
        self._children = children
        self._post = post
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._timer: Timer | None = None

    def start(self) -> None:
        """There are procs now."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    def pong(self, child: Child) -> None:
        """A proc answered."""
        child.asked_at = None
        since, child.unresponsive_since = child.unresponsive_since, None
        if since is not None:
            self._tell(child, "proc.responsive", since)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for child in self._children.alive():
            if child.state not in ("running", "stopping") or child.leash is None:
                continue
            if child.asked_at is None:
                child.asked_at = now
                child.leash.ping()
            elif child.unresponsive_since is None and now - child.asked_at > self._patience_s - self._interval_s / 2:
                child.unresponsive_since = time.time() - (now - child.asked_at)
                self._tell(child, "proc.unresponsive", child.unresponsive_since)
        if self._children.alive():
            self.start()

    def _tell(self, child: Child, method: str, since: float) -> None:
        self._post.tell_all(child.watchers, method, Pressed(address=child.address, pid=child.pid, since=since))
