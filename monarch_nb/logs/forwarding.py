"""What the processes of a script write, written where the script runs; in a notebook the cells show it instead."""

import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from monarch_nb.logs.lines import Gathered, LogOptions, merged, prefix, source_of
from monarch_nb.logs.receiver import Written, output_of
from monarch_nb.runtime import ProcState, Runtime
from monarch_nb.runtime.displays import displays
from monarch_nb.settings import settings

STALE_SECONDS = 1.0  # a line without end is written after that long
DRAIN_SECONDS = 5.0  # how long at most the end of the program waits for what was written before it
FORGET_SECONDS = 5.0  # after the end of a mesh: its last words may still be on their way

logger = logging.getLogger(__name__)


class Forwarding:
    """Follows each process that this one starts. Lines are written by a thread of its own, never by the reading one."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._output = output_of(engine)
        self._lines = Gathered(engine)
        self._wake = threading.Event()
        self._writing = threading.Lock()  # one batch at a time, in order
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stop_listening = self._output.listen(self._wrote)
        engine.keeper.on_event.append(self._happened)
        engine.keeper.log_options = LogOptions(engine)
        engine.keeper.log_options.flush = self.settle

    def close(self) -> None:
        """Somebody else shows it from now on."""
        self._closed = True
        self._stop_listening()
        if self._happened in self._engine.keeper.on_event:
            self._engine.keeper.on_event.remove(self._happened)
        self._wake.set()

    def settle(self) -> None:
        """Writes what processes wrote before their replies and ends that are known here; blocks for it, not long."""
        if self._thread is None or self._closed:
            return
        self._output.drain(self._engine.log_positions, DRAIN_SECONDS)
        self._cut(0.0)
        self.flush(all_of_it=True)

    def _happened(self, kind: str, about: Any) -> None:
        if kind == "started" and self._is_ours(about.address):
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="monarch-output", daemon=True)
                self._thread.start()
            self._output.follow([about.address])
        elif kind == "stopped" and isinstance(about, ProcState):
            self._engine.later(FORGET_SECONDS, lambda: self._forget(about.uid))

    def _is_ours(self, address: str) -> bool:
        """Agents also tell of processes that this one only refers to: those are shown where they were spawned."""
        state = self._engine.meshes.get(address.partition("/")[2].partition(".")[0])
        return isinstance(state, ProcState) and state.born is not None

    def _forget(self, uid: str) -> None:
        self._output.forget(uid)
        for address in tuple(self._engine.log_positions):
            if address.partition("/")[2].startswith(f"{uid}."):
                self._engine.log_positions.pop(address, None)

    def _wrote(self, address: str, written: Sequence[Written]) -> None:
        self._lines.put(written)
        self._wake.set()

    def _work(self) -> None:
        while not self._closed and not self._engine.closed:
            held = self._lines.wait()
            self._wake.wait(min(held or STALE_SECONDS, STALE_SECONDS / 2) if self._output.open_lines() else held)
            self._wake.clear()
            try:
                self._cut(STALE_SECONDS)
                self.flush()
            except (OSError, ValueError):  # nobody reads it any more
                return
            except Exception:
                logger.exception("output of processes could not be written")

    def _cut(self, age: float) -> None:
        for place, (_, overwrites, seconds) in self._output.open_lines().items():
            if seconds >= age and (age == 0.0 or not overwrites):
                self._output.cut(place)

    def flush(self, *, all_of_it: bool = False) -> None:
        """Writes all complete lines now, but those of windows that last; with `all_of_it` these too."""
        with self._writing:
            lines, gathered = self._lines.take(all_of_it=all_of_it)
            text = ""
            for line in lines:
                if line.display is not None and displays.kept:
                    _write(text)  # in a process: on to where its own output goes
                    text = ""
                    displays.relay(line.display, line.call, line.address)
                elif line.display is None or line.text:
                    text += f"{self._prefix(line.address)}{line.text}\n"
            text += "".join(merged(self._engine, gathered, named=True, prefixed=settings.get("prefix_with_rank")))
            _write(text)

    def _prefix(self, address: str) -> str:
        option = self._engine.keeper.log_options.of(address)
        streamed = settings.get("enable_log_forwarding") or (option is not None and option.stream)
        if not streamed or not settings.get("prefix_with_rank"):
            return ""
        return prefix([source_of(self._engine, address)], named=True)


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
