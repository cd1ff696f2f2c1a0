"""Output of a proc, written to files that its agent reads: writing never waits for a reader or fails on a full disk."""

import io
import os
import sys
import threading
import time
from collections.abc import Callable

from monarch_nb.host.linux import line_buffer_c_stdio
from monarch_nb.logs.spool import DISPLAY, ERR, OUT, STDERR, STDOUT, TEXT, Mark, clean

TURN_SECONDS = 0.0001  # a pause in which waiting writers get their turn
MARK_SECONDS = 0.05  # after which text gets a new mark, which has its time


class ForgivingText(io.TextIOWrapper):
    """A text stream that never raises for lack of space; it reports lost output once it can be written to again.

    All layers below are C: an interrupt cannot separate the writing of a line from the record that it was written.
    """

    _reason = ""

    def write(self, text: str, /) -> int:
        """Writes what can be written."""
        try:
            if self._reason:
                super().flush()  # raises until there is room; so one note is buffered, not one for each text
                super().write(f"[output was lost here: {self._reason}]\n")
                self._reason = ""
            return super().write(text)
        except OSError as error:
            self._reason = error.strerror or str(error)
            return len(text)

    def flush(self) -> None:
        """Writes buffered text if it can be written."""
        try:
            super().flush()
        except OSError as error:
            self._reason = error.strerror or str(error)


class MarkedText(ForgivingText):
    """sys.stdout or sys.stderr of a proc: text of another call or kind than the text before it begins with a mark."""

    journal: "Journal"
    stream = STDOUT
    unfinished = False  # text may be buffered

    def write(self, text: str, /) -> int:
        """Writes what can be written. From any thread."""
        queue, me = self.journal.queue, threading.get_ident()
        try:
            queue.add(me)
            with self.journal.lock:
                queue.discard(me)
                self.unfinished = True
                self.journal.before(self.stream)
                done = super().write(clean(text))
                self.unfinished = bool(self._reason) or ("\n" not in text and "\r" not in text)
        finally:
            queue.discard(me)
        if queue and not self.unfinished:  # else a busy writer takes the lock again before others wake
            time.sleep(TURN_SECONDS)
        return done

    def flush(self) -> None:
        """Writes buffered text if it can be written."""
        if self.unfinished:
            with self.journal.lock:
                super().flush()
                self.unfinished = bool(self._reason)

    def fileno(self) -> int:
        """Returns the descriptor that child processes and C code write to; their output is stored separately."""
        return self.stream


class Journal:
    """The text file of a proc's spool, with its marks. Methods from any thread.

    Output belongs to no call until `tag_by` has set how to find calls.
    """

    def __init__(self, base: str) -> None:
        self.lock = threading.RLock()
        self.queue: set[int] = set()  # threads that wait for the lock
        self._tag: Callable[[], tuple[str, int]] = lambda: ("", 0)
        self._sole: Callable[[], str] = lambda: ""
        self._key: tuple[int, str, int] = (STDOUT, "", 0)
        self._marked_at = 0.0
        self._sizes = (0, 0)
        self._files = tuple(os.open(base + kind, os.O_RDONLY | os.O_CLOEXEC) for kind in (OUT, ERR))
        self._marking = True
        self.texts = tuple(self._text(base + TEXT, stream) for stream in (STDOUT, STDERR))
        os.register_at_fork(after_in_child=self._in_child)

    def _text(self, path: str, stream: int) -> MarkedText:
        raw = io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "w")
        text = MarkedText(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        text.journal, text.stream = self, stream
        return text

    def tag_by(self, tag: Callable[[], tuple[str, int]], sole: Callable[[], str]) -> None:
        """Sets how to find the call of output.

        `tag` returns the call of the running code and the level of the logging record being written, `sole` the
        only call that runs; "" and 0 for none.
        """
        self._tag, self._sole = tag, sole

    def before(self, stream: int) -> None:
        """Marks the next text if its mark would differ from the last one. Under the lock."""
        key = (stream, *self._tag())
        now = time.time()
        if not self._marking:
            return
        if key != self._key or now - self._marked_at > MARK_SECONDS or self._raw_sizes() != self._sizes:
            self._mark(key, now)

    def display(self, line: bytes, tag: tuple[str, int]) -> bool:
        """Writes a display, for the call in `tag`, as a line of its own. Returns False if it cannot be written."""
        if not self._marking:
            return False
        with self.lock:
            if not self._mark((DISPLAY, *tag), time.time()):
                return False
            file = self.texts[0].buffer.fileno()
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(file, rest) :]
            except OSError:  # the disk is full; the next mark ends the partial line
                return False
        return True

    def mark(self) -> None:
        """Marks the call of raw output since the last mark, if there is any."""
        if self._raw_sizes() != self._sizes and self._marking:
            with self.lock:
                self._mark(self._key, time.time())

    def position(self) -> int:
        """Returns the end of the output so far, in bytes of the text file; 0 before any output."""
        self.texts[0].flush()
        self.texts[1].flush()
        self.mark()
        return os.lseek(self.texts[0].buffer.fileno(), 0, os.SEEK_END)

    def _raw_sizes(self) -> tuple[int, int]:
        return os.lseek(self._files[0], 0, os.SEEK_END), os.lseek(self._files[1], 0, os.SEEK_END)

    def _mark(self, key: tuple[int, str, int], now: float) -> bool:
        for text in self.texts:
            ForgivingText.flush(text)
        stream, call, level = key
        sizes = self._raw_sizes()
        raw = self._sole() if sizes != self._sizes else ""
        try:
            os.write(self.texts[0].buffer.fileno(), Mark(now, stream, level, call, *sizes, raw).encode())
        except OSError:
            return False  # the disk is full: the next text will fail as well
        self._key, self._marked_at, self._sizes = key, now, sizes
        return True

    def _in_child(self) -> None:
        """Switches a process forked by the user's code to raw output: marks belong to its parent."""
        self.lock = threading.RLock()
        self.queue.clear()
        self._marking = False
        for text in self.texts:
            os.dup2(text.stream, text.buffer.fileno(), inheritable=False)


def redirect(base: str) -> Journal | None:
    """Points stdin at nothing and stdout and stderr, Python's and C's, at the files of the spool `base`.

    Returns the journal; None if it cannot be created, then all output is dropped.
    """
    _onto(os.devnull, os.O_RDONLY, 0)
    journal = None
    try:
        if base:
            for kind, target in ((TEXT, None), (OUT, 1), (ERR, 2)):
                _onto(base + kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND, target)
            journal = Journal(base)
    except OSError:
        pass
    if journal is None:
        for target in (1, 2):
            _onto(os.devnull, os.O_WRONLY, target)
    line_buffer_c_stdio()
    out, err = journal.texts if journal is not None else (_plain(1), _plain(2))
    streams = {"stdin": io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False))), "stdout": out, "stderr": err}
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return journal


def journal_of_this_process() -> Journal | None:
    """Returns the journal that `redirect` has created."""
    return getattr(sys.__stdout__, "journal", None)


def _onto(path: str, flags: int, target: int | None) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if target is not None:
        os.dup2(fd, target)
    if fd != target:
        os.close(fd)


def _plain(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return ForgivingText(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
