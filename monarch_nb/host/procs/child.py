"""One proc as its agent knows it."""

import time

from msgspec import Struct, field
from msgspec.structs import replace

from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.protocol import Exited, ProcSpec, ProcState


class Child(Struct, eq=False):
    """A proc from the request for it to its end. States: starting, running, stopping, exited."""

    spec: ProcSpec
    watchers: set[str]
    state: str = "starting"
    pid: int = 0
    how: str = ""
    light: bool = False  # forked before the template had imported what it imports
    why: str = ""
    channel: ProcChannel | None = None
    requested_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # wall clock
    asked_at: float | None = None  # monotonic: a ping is out since
    ran: float | None = None  # processor seconds, when it answered last
    ask_by: float = 0.0  # monotonic: then it is asked in any case
    unresponsive_since: float | None = None  # wall clock
    stop_wanted: bool = False
    stop_reason: str = ""
    evicted: bool = False  # stopped by nobody's wish
    log_file: str = ""
    exit: Exited | None = None

    @property
    def address(self) -> str:
        """The proc's address."""
        return self.spec.address

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one that is still being started counts."""
        return self.exit is None

    def own(self, owner: str) -> None:
        """Somebody else owns it from now on."""
        self.spec = replace(self.spec, owner=owner)

    def let_go(self) -> None:
        """It has ended, and all know: only what is told to those who ask late is kept."""
        self.channel = None
        self.watchers.clear()
        self.spec = replace(self.spec, env={}, sys_path=(), cwd=None)

    def describe(self) -> ProcState:
        """What agent.status says of it."""
        return ProcState(
            address=self.address, pid=self.pid, state=self.state, owner=self.spec.owner, name=self.spec.name,
            how=self.how, why=self.why, started_at=self.started_at, unresponsive_since=self.unresponsive_since,
            exit=self.exit,
        )  # fmt: skip
