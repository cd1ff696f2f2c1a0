"""Inner names of torchmonarch that programs look at: who is running, how processes start, what notebooks are."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from enum import Enum

from monarch_nb.runtime import Context, current, kind_of, started
from monarch_nb.settings import transport

_context = current
_BOOTSTRAP_MAIN = "monarch._src.actor.bootstrap_main"


def _get_bootstrap_args() -> tuple[str, list[str] | None, dict[str, str]]:
    """A program, its arguments and its environment that become a process of a mesh."""
    return sys.executable, ["-m", _BOOTSTRAP_MAIN], {}


BindSpec = transport
"""Where to listen, from a ChannelTransport, its word, or an address: what `default_transport` reads back as."""


class ActorKind(Enum):
    """How the endpoints of an actor are executed: on a thread of its own, or on an event loop of its own."""

    SYNC = "sync"
    ASYNC = "async"


def _actor_kind(cls: type) -> ActorKind:
    """The kind of an actor class. Raises ValueError for one that mixes both."""
    return ActorKind(kind_of(cls))


class _ClientContext:
    def try_get(self) -> Context | None:
        """The context of the client in this process; None in processes of a mesh, and before the first use."""
        here = started()
        root = None if here is None else here.root_context
        return root if root is not None and root.actor_instance.class_name is None else None


_client_context = _ClientContext()


_pending_flush_tasks: frozenset[asyncio.Task[None]] = frozenset()
"""Flushes of output that are under way at the end of a cell: none, for output is not held back."""


def has_tensor_engine() -> bool:
    """Whether torchmonarch's distributed tensors are there: they are not."""
    return False


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


__all__ = ["ActorKind", "BindSpec", "fake_sync_state", "has_tensor_engine", "in_fake_sync_state", "is_ipython"]
