"""Records of `logging` from within an actor begin with its name: "[actor=<root>.<module.Class name>] …".

The level of a record is available to the store of the output while the record is written.
"""

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from monarch_nb.wire import text_of

R = TypeVar("R")

P = ParamSpec("P")


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


def install(running: Callable[[], object | None]) -> None:
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


def level() -> int:
    """Returns the level of the record that this thread is writing, 0 if none."""
    return _writing.level


def levels_are_known() -> None:
    """Makes `level` return the level of records from now on, for all handlers; warnings have one, too."""
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
