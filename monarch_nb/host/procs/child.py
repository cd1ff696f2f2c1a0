"""One process as its agent sees it."""

import math
import time

from msgspec import Struct, field
from msgspec.structs import replace

from monarch_nb.host.linux import processor_time, state_letter
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.protocol import Exited, ProcSample, ProcSpec, ProcStatus
from monarch_nb.wire import size_text


class MemoryReadings:
    """The memory of a process in the last minutes: few readings, the older the farther apart."""

    MOST = 12
    APART = 3.0  # times as old as the one before is a reading that is shown

    def __init__(self) -> None:
        self._readings: list[tuple[float, int]] = []  # wall clock, and bytes

    def add(self, timestamp: float, size: int) -> None:
        """Adds a reading, unless it is 0 bytes."""
        if size:
            self._readings.append((timestamp, size))
        if len(self._readings) > self.MOST:
            del self._readings[1 : self.MOST // 2 : 2]

    def text(self, now: float) -> str:
        """Returns the readings, the newest first: "9.81 GB 1 s before, 4.10 GB 8 s before"; "" without readings."""
        parts, shown_age = list[str](), 0.0
        for timestamp, size in reversed(self._readings):
            if (age := now - timestamp) >= self.APART * shown_age:
                parts.append(f"{size_text(size)} {age:.0f} s before")
                shown_age = max(age, 1.0)
        return ", ".join(parts)


class Child(Struct, eq=False):
    """A process from the request for it to its end. States: starting, running, stopping, exited."""

    spec: ProcSpec
    watchers: set[str]
    state: str = "starting"
    pid: int = 0
    how: str = ""
    light: bool = False  # forked from the light template
    why: str = ""
    channel: ProcChannel | None = None
    requested_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # wall clock
    asked_at: float | None = None  # monotonic, while a ping is unanswered
    ran: float | None = None  # processor seconds at its last answer
    memory: MemoryReadings = field(default_factory=MemoryReadings)
    ask_by: float = 0.0  # monotonic: the next ping at the latest
    unresponsive_since: float | None = None  # wall clock
    stop_wanted: bool = False
    stop_reason: str = ""
    evicted: bool = False  # stopped without its owner's request
    log_file: str = ""
    exit: Exited | None = None

    @property
    def address(self) -> str:
        """The proc's address."""
        return self.spec.address

    @property
    def alive(self) -> bool:
        """True until it has ended, also while it is being started."""
        return self.exit is None

    def own(self, owner: str) -> None:
        """Changes its owner."""
        self.spec = replace(self.spec, owner=owner)

    def discard(self) -> None:
        """Drops everything but the report for late requests, once its end has been reported."""
        self.channel = None
        self.watchers.clear()
        self.spec = replace(self.spec, env={}, sys_path=(), cwd=None)

    def sample(self) -> ProcSample:
        """Returns its state and processor time as the system has them, whether it answers or not."""
        used = processor_time(self.pid) if self.pid else None
        return ProcSample(state_letter(self.pid) if self.pid else "", math.nan if used is None else used)

    def describe(self) -> ProcStatus:
        """Returns its part of agent.status."""
        return ProcStatus(
            address=self.address, pid=self.pid, state=self.state, owner=self.spec.owner, name=self.spec.name,
            how=self.how, why=self.why, started_at=self.started_at, unresponsive_since=self.unresponsive_since,
            exit=self.exit,
        )  # fmt: skip
