"""Activity of threads in torch.distributed, from PyTorch's flight recorder and from frames."""

import logging
import sys
import threading
from types import FrameType

import msgspec

from monarch_nb.wire import json_decoder

logger = logging.getLogger(__name__)

MAKES_STORE = "_create_c10d_store"  # the torch function that finds or creates a store


class FlightRecord(msgspec.Struct, frozen=True):
    """A collective of the flight recorder."""

    process_group: tuple[str, str] = ("", "")
    thread_id: str = ""
    time_created_ns: int = 0  # wall clock
    retired: bool = False
    state: str = ""
    collective_seq_id: int = 0
    profiling_name: str = ""  # "gloo:all_reduce"
    input_dtypes: object = ()  # lists, whose form differs between versions
    input_sizes: object = ()
    is_p2p: bool = False

    @property
    def thread(self) -> int:
        """The thread that began it; 0 where that is not known."""
        return int(self.thread_id) if self.thread_id.isdecimal() else 0

    @property
    def has_ended(self) -> bool:
        """True if no thread waits for it."""
        return self.retired or self.state == "completed"


class _Records(msgspec.Struct, frozen=True):
    entries: list[FlightRecord] = []


_decoder = json_decoder(_Records)


def records() -> list[FlightRecord]:
    """Returns the last collectives of this process. Takes a tenth of a second for thousands.

    Empty if PyTorch is configured to record none; older versions do not record gloo's collectives.
    """
    library = sys.modules.get("torch._C._distributed_c10d")
    entries: list[FlightRecord] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(library, name, None)
        if dump is not None:
            try:
                entries += _decoder.decode(dump(True, False)).entries
            except Exception:  # another version of PyTorch
                logger.debug("%s", name, exc_info=True)
    return entries


def address(store: object) -> tuple[str, int]:
    """Returns host and port of the server behind a store of torch.distributed; ("", 0) if it has none."""
    for _ in range(8):
        kind = type(store)
        if not kind.__module__.startswith("torch."):  # the program's objects are not touched
            break
        if kind.__name__ == "TCPStore":
            return str(getattr(store, "host", "")), int(getattr(store, "port", 0))
        store = getattr(store, "underlying_store", None) if kind.__name__ == "PrefixStore" else None
    return "", 0


def frames_of(thread: int) -> list[FrameType]:
    """Returns the frames of a thread, the innermost first."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def is_torchs(frame: FrameType) -> bool:
    """Returns whether a function belongs to torch.distributed."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")


def is_in_torch(frames: list[FrameType]) -> bool:
    """Returns whether the innermost function belongs to PyTorch."""
    return bool(frames) and str(frames[0].f_globals.get("__name__", "")).startswith("torch")


def stores(frame: FrameType) -> list[object]:
    """Returns the stores in a function's variables."""
    return [value for value in tuple(frame.f_locals.values()) if address(value)[1]]


def sought_store(frame: FrameType) -> tuple[str, int] | None:
    """Returns the store that a torch function looks for or creates; None for other functions."""
    if frame.f_code.co_name != MAKES_STORE:
        return None
    values = frame.f_locals
    host, port = values.get("hostname"), values.get("port")
    return (str(host), port) if host and isinstance(port, int) else None


def python_threads() -> frozenset[int]:
    """Returns the threads that Python has started."""
    return frozenset(thread.ident for thread in threading.enumerate() if thread.ident is not None)
