"""A line while an answer is decoded and imports packages, such as torch for a tensor, which may take seconds."""

import sys
import threading
from types import FrameType

from monarch_nb.wire import decode

from .front import Front, TransientLines

AFTER_SECONDS = 1.0
LOOKS_EVERY = 0.1


class ImportNotices:
    """A module finder that finds nothing: it notes the first package that is imported while an answer is decoded."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._reading = False

    def install(self) -> None:
        """Starts to report such imports."""
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Stops."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by each import of a module that is not loaded yet."""
        if "." in name or self._reading or not self._front.in_cell or not _reads(sys._getframe()):
            return
        self._reading = True
        threading.Thread(target=self._watch, args=(name,), name="monarch-import", daemon=True).start()

    def _watch(self, name: str) -> None:
        line, ended, main = TransientLines(self._front), threading.Event(), threading.main_thread().ident
        waited = 0.0
        try:
            while (frame := sys._current_frames().get(main or 0)) is not None and _reads(frame):
                ended.wait(LOOKS_EVERY)
                waited += LOOKS_EVERY
                if waited >= AFTER_SECONDS:
                    line.show(f"⏳ the answer is here; reading it imports {name} into this kernel, once")
        finally:
            line.clear()
            self._reading = False


def _reads(frame: FrameType | None) -> bool:
    """True within the decoding of an answer."""
    while frame is not None:
        if frame.f_code is decode.__code__:
            return True
        frame = frame.f_back
    return False
