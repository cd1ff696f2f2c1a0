"""Inner names of torchmonarch that programs use: the running actor, the start of processes, checks for notebooks, parts
of shapes, records of `logging` in traces, and functions that fail on purpose, to test how programs react."""

import asyncio
import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias

from monarch_nb._package import imported
from monarch_nb.runtime import Context, current, kind_of, started
from monarch_nb.settings import transport
from monarch_nb.shape import NDSlice, Selector, Shape

_context = current
_BOOTSTRAP_MAIN = "monarch._src.actor.bootstrap_main"


def _get_bootstrap_args() -> tuple[str, list[str] | None, dict[str, str]]:
    """Returns a program, its arguments and its environment, which start a process of a mesh."""
    return sys.executable, ["-m", _BOOTSTRAP_MAIN], {}


BindSpec = transport
"""Where to listen: a ChannelTransport, its word, or an address; `default_transport` returns it."""


class ActorKind(Enum):
    """The way an actor's endpoints are executed: on a thread of its own, or on an event loop of its own."""

    SYNC = "sync"
    ASYNC = "async"


def _actor_kind(cls: type) -> ActorKind:
    """Returns the kind of an actor class. Raises ValueError for a class that mixes both."""
    return ActorKind(kind_of(cls))


class _ClientContext:
    def try_get(self) -> Context | None:
        """Returns the context of the client in this process; None in processes of a mesh, and before the first use."""
        runtime = started()
        return None if runtime is None or runtime.is_worker else runtime.root_context

    @property
    def _val(self) -> Context | None:
        return self.try_get()


_client_context = _ClientContext()


_pending_flush_tasks: frozenset[asyncio.Task[None]] = frozenset()
"""Flushes of output in progress at the end of a cell: none, since output is not held back."""


def has_tensor_engine() -> bool:
    """Returns False: torchmonarch's distributed tensors do not exist here."""
    return False


def is_ipython() -> bool:
    """Returns whether this program is a notebook's kernel or an IPython prompt. Does not import IPython."""
    module = imported("IPython")
    return module is not None and module.get_ipython() is not None


_hidden = threading.local()


@contextlib.contextmanager
def fake_sync_state() -> Iterator[None]:
    """Hides the running event loop of this thread, so that code for synchronous callers runs in the block."""
    loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    _hidden.depth = getattr(_hidden, "depth", 0) + 1
    try:
        yield
    finally:
        _hidden.depth -= 1
        asyncio.events._set_running_loop(loop)


def in_fake_sync_state() -> bool:
    """Returns whether `fake_sync_state` hides a loop here."""
    return getattr(_hidden, "depth", 0) > 0


class PanicException(BaseException):
    """Raised by `panicking_function`. It is no Exception, so it ends the actor."""


def panicking_function() -> None:
    """Raises PanicException, always."""
    raise PanicException("this function always panics")


def blocking_function() -> None:
    """Never returns; its thread does not hold the interpreter's lock."""
    threading.Event().wait()


def sleep_indefinitely_for_unit_tests() -> None:
    """Never returns, except by KeyboardInterrupt."""
    threading.Event().wait()


def hold_gil_for_test(delay_secs: float, hold_secs: float) -> None:
    """Holds the interpreter's lock for `hold_secs`, from `delay_secs` on: no other thread runs Python meanwhile."""
    library = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call

    def hold() -> None:
        library.usleep(ctypes.c_uint(int(hold_secs * 1e6)))

    timer = threading.Timer(delay_secs, hold)
    timer.daemon = True
    timer.start()


Slices: TypeAlias = NDSlice | list[NDSlice]


def iter_ranks(ranks: Slices) -> Iterator[int]:
    """Returns the base ranks of one slice, or of several, each rank once."""
    parts = ranks if isinstance(ranks, list) else [ranks]
    return iter(dict.fromkeys(rank for part in parts for rank in part))


class ShapeExt:
    """Selection along several dimensions of a shape at once."""

    @staticmethod
    def slice(shape: Shape, /, **dims: Selector) -> Shape:
        """Returns a part of `shape`: an index drops the dimension, a slice keeps it; errors as `Region.sliced`."""
        return Shape.of(shape.region.sliced(**dims))


logger = logging.getLogger("monarch_nb.compat")
_said = False


class TracingForwarder(logging.Handler):
    """Adds each record to the current span as an event, where OpenTelemetry records one; announces that once.

    As in torchmonarch a record from within an actor gets the actor's name as `actor_id`.
    """

    def __init__(self, level: int = logging.NOTSET) -> None:
        global _said
        super().__init__(level)
        if not _said:
            _said = True
            logger.warning(
                "TracingForwarder: accepted; records become events of the current OpenTelemetry span, where the "
                "program records any, and go nowhere else from here"
            )

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the event."""
        running = current.get()
        if running is not None:
            record.actor_id = str(running.actor_instance.actor_id)
        with contextlib.suppress(ImportError):
            from opentelemetry import trace

            span = trace.get_current_span()
            if span.is_recording():
                try:
                    text = record.getMessage()
                except Exception:
                    self.handleError(record)
                    return
                span.add_event(text, {"log.severity": record.levelname, "log.logger": record.name})


__all__ = [
    "ActorKind",
    "BindSpec",
    "PanicException",
    "TracingForwarder",
    "blocking_function",
    "fake_sync_state",
    "has_tensor_engine",
    "hold_gil_for_test",
    "in_fake_sync_state",
    "is_ipython",
    "panicking_function",
]
