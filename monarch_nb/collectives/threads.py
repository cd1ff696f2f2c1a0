"""What threads do in torch.distributed: by PyTorch's flight recorder, and by the functions that they are in."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

MAKES_STORE = "_create_c10d_store"  # the function of torch's that finds a store, or makes it


def has_recorder() -> bool:
    """Whether PyTorch remembers collectives: it may be told not to, and older versions do not for gloo."""
    return next(records(), None) is not None


def records() -> Iterator[tuple[str, int, int, bool]]:
    """Of each collective that is remembered: the group's name, the thread, when it began, whether it has ended."""
    library: Any = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(library, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump(True, False)).get("entries", ())
        except Exception:  # of a version that tells it otherwise
            logger.debug("%s", name, exc_info=True)
            continue
        for entry in entries:
            group = entry.get("process_group") or [""]
            thread = str(entry.get("thread_id", ""))
            ended = bool(entry.get("retired")) or entry.get("state") == "completed"
            yield (
                str(group[0]),
                int(thread) if thread.isdecimal() else 0,
                int(entry.get("time_created_ns", 0)),
                ended,
            )


def address(store: Any) -> tuple[str, int]:
    """Host and port of the server behind a store of torch.distributed; ("", 0) where it has none."""
    for _ in range(8):
        kind = type(store)
        if not kind.__module__.startswith("torch."):  # nothing is asked of objects of the program's
            break
        if kind.__name__ == "TCPStore":
            return str(store.host), int(store.port)
        store = store.underlying_store if kind.__name__ == "PrefixStore" else None
    return "", 0


def frames_of(thread: int) -> list[FrameType]:
    """What a thread is in, the innermost first."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def is_torchs(frame: FrameType) -> bool:
    """Whether a function is one of torch.distributed."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")


def is_in_torch(frames: list[FrameType]) -> bool:
    """Whether the innermost function is one of PyTorch's."""
    return bool(frames) and str(frames[0].f_globals.get("__name__", "")).startswith("torch")


def stores(frame: FrameType) -> list[Any]:
    """Stores that a function has in a variable."""
    return [value for value in tuple(frame.f_locals.values()) if address(value)[1]]


def looked_for(frame: FrameType) -> tuple[str, int] | None:
    """The store that a function of torch's is to find or to make."""
    if frame.f_code.co_name != MAKES_STORE:
        return None
    found = frame.f_locals
    host, port = found.get("hostname"), found.get("port")
    return (str(host), port) if host and isinstance(port, int) else None


def python_threads() -> frozenset[int]:
    """Threads that Python has started."""
    return frozenset(thread.ident for thread in threading.enumerate() if thread.ident is not None)
