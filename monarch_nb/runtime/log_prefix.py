"""Records of `logging` from within an actor begin with who says it: "[actor=<root>.<module.Class name>] …"."""

import logging
import threading
from dataclasses import dataclass
from typing import Any

from monarch_nb.runtime.context import current


@dataclass
class ActorConfig:
    """Switches of `monarch.actor.config`."""

    prefix_python_logs_with_actor: bool = True


config = ActorConfig()
_lock = threading.Lock()
_installed = False


def _prefixed(record: logging.LogRecord) -> logging.LogRecord:
    running = current.get()
    # Libraries use empty messages for structured records, which must stay as they are.
    if running is None or not config.prefix_python_logs_with_actor or not record.msg:
        return record
    prefix = f"[actor={running.actor_instance}] "
    record.actor_prefix = prefix
    record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{record.msg}"
    return record


def install() -> None:
    """Has all records of this process made so, whichever handlers they go to and whenever these are added."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
        make = logging.getLogRecordFactory()

        def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
            return _prefixed(make(*args, **kwargs))

        logging.setLogRecordFactory(factory)
