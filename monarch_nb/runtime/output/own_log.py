"""The output of this process: the calls that it belongs to, its position, its log records, and its stacks.

Records of `logging` from within an actor begin with its name: "[actor=<root>.<module.Class name>] …".
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TextIO, TypeVar

from monarch_nb.runtime.output.displays import displays
from monarch_nb.wire import flush_output, parse_address, text_of

AT_ONCE_S = 0.001  # a call that begins this soon after another has ended gets no mark
R = TypeVar("R")
P = ParamSpec("P")

# A signal that nothing else uses; its default action is to end a process, hence never sent without the file.
STACKS_SIGNAL: int = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0


class OutputSink(Protocol):
    """The destination of a process's output."""

    @property
    def texts(self) -> Sequence[TextIO]:
        """The streams that `position` flushes."""

    def tag_by(self, tag: Callable[[], tuple[str, int]], sole: Callable[[], str]) -> None:
        """Sets the functions that return the call of output: that of the running code, and the only one that runs."""

    def display(self, line: bytes, tag: tuple[str, int]) -> bool:
        """Writes a display. False if it cannot be written."""

    def mark(self) -> None:
        """Assigns output of C code and child processes since the last mark to the present call."""

    def position(self) -> int:
        """Returns the end of the output so far."""


class OwnLog:
    """Records the calls that run here. Methods from any thread; without a journal they do nothing.

    `running` returns the outermost call that the running code belongs to, "" for none.
    """

    def __init__(self, running: Callable[[], str]) -> None:
        self._running = running
        self._journal: OutputSink | None = None
        self._calls: list[str] = []  # the outermost calls of running code
        self._ended_at = float("-inf")  # when one of them ended last

    def keep(self, journal: OutputSink) -> None:
        """Sends output to files that are followed: replies carry its position, and text carries its call."""
        journal.tag_by(self.tag, self.sole)
        self._journal = journal
        displays.write_to(self)

    def display(self, line: bytes, call: str | None = None) -> bool:
        """Writes a display, for the running code or for a call. False if it cannot be written."""
        return self._journal is not None and self._journal.display(line, self.tag() if call is None else (call, 0))

    def begin(self, origin: str) -> None:
        """Begins a run for a call."""
        if self._journal is not None:
            if self._calls or time.monotonic() - self._ended_at > AT_ONCE_S:
                self._journal.mark()
            self._calls.append(origin)

    def end(self, origin: str, *, answered: bool = False) -> None:
        """Ends the run; with `answered`, the answer's position has marked its output."""
        if self._journal is not None:
            if not answered:
                self._journal.mark()
            self._ended_at = time.monotonic()
            if origin in self._calls:
                self._calls.remove(origin)

    def position(self) -> int:
        """Returns the position of the output; 0 if it is not stored."""
        if self._journal is None:
            return 0
        displays.flush()
        texts = self._journal.texts
        try:
            if sys.stdout not in texts or sys.stderr not in texts:  # the program has replaced it
                flush_output(texts)
            return self._journal.position()
        except (OSError, ValueError, AttributeError):
            return 0

    def tag(self) -> tuple[str, int]:
        """Returns the call of the running code, or the only one that runs, and the level of its present log record."""
        return self._running() or self.sole(), record_level()

    def sole(self) -> str:
        """Returns the only call that runs, "" if there are none or several."""
        calls = set(self._calls)
        return calls.pop() if len(calls) == 1 else ""


@dataclass
class ActorConfig:
    """Switches of `monarch.actor.config`."""

    prefix_python_logs_with_actor: bool = True


config = ActorConfig()
_lock = threading.Lock()
_installed = False


def _prefixed(record: logging.LogRecord, actor: object | None) -> logging.LogRecord:
    # Libraries use empty messages for structured records, which must stay as they are.
    message: Any = record.msg  # anything may be logged: arrays have no truth, and others no text
    if actor is None or not config.prefix_python_logs_with_actor or (isinstance(message, str) and not message):
        return record
    text = message if isinstance(message, str) else text_of(message)
    prefix = f"[actor={actor}] "
    record.actor_prefix = prefix
    record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{text}"
    return record


def prefix_records(running: Callable[[], object | None]) -> None:
    """Gives all records of this process this form, for all handlers, whenever they are added.

    The text of `running()` names the actor that runs; None: no actor.
    """
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
        make = logging.getLogRecordFactory()

        def factory(*args: object, **kwargs: object) -> logging.LogRecord:
            return _prefixed(make(*args, **kwargs), running())

        logging.setLogRecordFactory(factory)


class _Writing(threading.local):
    level = 0


_writing = _Writing()


def record_level() -> int:
    """Returns the level of the record that this thread is writing, 0 if none."""
    return _writing.level


def levels_are_known() -> None:
    """Makes `record_level` return the level of records from now on, for all handlers; warnings have one, too."""
    logging.Handler.handle = _at_level(  # type: ignore[method-assign]
        logging.Handler.handle, lambda handler, record, *_: int(record.levelno)
    )
    warnings.showwarning = _at_level(warnings.showwarning, lambda *_: logging.WARNING)


def _at_level(function: Callable[P, R], level_of: Callable[..., int]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _writing.level
        _writing.level = level_of(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _writing.level = before

    return run


def stacks_file(run_folder: str | Path, address: str) -> Path:
    """Returns the file for a process's stacks."""
    return Path(run_folder) / f"stacks-{parse_address(address).name}"


def register_stacks(run_folder: str | Path, address: str) -> None:
    """Makes STACKS_SIGNAL write this process's stacks into that file from now on. On the main thread."""
    if not STACKS_SIGNAL or not hasattr(faulthandler, "register"):
        return
    try:
        descriptor = os.open(
            stacks_file(run_folder, address), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
    except OSError:  # a full disk is no reason not to start
        return
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
