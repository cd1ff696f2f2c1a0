"""Profiles that cells have shown, in a section of the panel, which comes with the first of them."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import VIEWS
from .live import LiveView, Watch, bundled

if TYPE_CHECKING:
    from monarch_nb.profiling import Profile

KEPT = 4
LARGEST = 1 << 20  # characters of one: all of them are one message, and proxies cut long ones


class ShownProfiles:
    """The profiles of this process, the newest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._profiles: list[dict[str, str]] = []
        self._last: Any = None
        self._watches: list[Watch] = []

    def add(self, profile: "Profile", html: str) -> None:
        """Adds a profile that a cell shows; the same profile twice in a row is added once."""
        title = f"{profile.name} · {profile.seconds:.1f} s · {time.strftime('%H:%M:%S')}"
        if len(html) > LARGEST:
            html = f'<div class="mnb">{len(html) >> 20} MB: it is in the cell alone</div>'
        with self._lock:
            if profile is self._last:
                return
            self._last = profile
            self._profiles.insert(0, {"key": str(next(self._numbers)), "title": title, "html": html})
            del self._profiles[KEPT:]
            watches = tuple(self._watches)
        for watch in watches:
            self._publish(watch)

    def feed(self, watch: Watch) -> Callable[[], None]:
        """Publishes the profiles and each new one to a front end until the result is called."""
        with self._lock:
            self._watches.append(watch)
        self._publish(watch)

        def end() -> None:
            with self._lock:
                self._watches.remove(watch)

        return end

    def _publish(self, watch: Watch) -> None:
        with self._lock:
            profiles = list(self._profiles)
        watch.publish(profiles=profiles)


SHOWN = ShownProfiles()
PROFILES = LiveView(name="profiles", title="Profiles", **bundled("profiles"), feed=SHOWN.feed)


def keep(profile: "Profile", html: str) -> None:
    """Gives the panel a profile that was shown."""
    SHOWN.add(profile, html)
    if VIEWS.get(PROFILES.name) is None:
        VIEWS.register(PROFILES)
