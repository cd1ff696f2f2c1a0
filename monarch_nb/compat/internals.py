"""Inner names of torchmonarch that programs look at: who is running, how processes start, what notebooks are."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

from monarch_nb.runtime import current
from monarch_nb.settings import transport

_context = current
_BOOTSTRAP_MAIN = "monarch._src.actor.bootstrap_main"


def _get_bootstrap_args() -> tuple[str, list[str] | None, dict[str, str]]:
    """A program, its arguments and its environment that become a process of a mesh."""
    return sys.executable, ["-m", _BOOTSTRAP_MAIN], {}


BindSpec = transport
"""Where to listen, from a ChannelTransport, its word, or an address: what `default_transport` reads back as."""


def is_ipython() -> bool:
    """Whether this program is a notebook's kernel or an IPython prompt. Does not import IPython."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


_hidden = threading.local()


@contextlib.contextmanager
def fake_sync_state() -> Iterator[None]:
    """Hides the running event loop of this thread: code for synchronous callers runs within."""
    loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    _hidden.depth = getattr(_hidden, "depth", 0) + 1
    try:
        yield
    finally:
        _hidden.depth -= 1
        asyncio.events._set_running_loop(loop)


def in_fake_sync_state() -> bool:
    """Whether `fake_sync_state` hides a loop here."""
    return getattr(_hidden, "depth", 0) > 0


__all__ = ["BindSpec", "fake_sync_state", "in_fake_sync_state", "is_ipython"]
