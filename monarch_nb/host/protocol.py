"""Bodies of the CONTROL messages between host agents, procs and controllers: msgspec structs, never pickles."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from monarch_nb.transport import KeyStep
from monarch_nb.wire.address import parse_address
from monarch_nb.wire.texts import Harmless

Environment = dict[str, str | None]  # laid over the agent's own environment; None removes a name


class ProcSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one process, sent at its start."""

    address: str
    agent: str
    host: str
    run_folder: str
    mesh: str  # uid of the proc mesh
    rank: int
    incarnation: int
    owner: str
    name: str = ""
    env: Environment = {}
    cwd: str | None = None
    sys_path: tuple[str, ...] = ()
    setup: int = 0
    log: str = ""  # prefix of the files with its output until the agent takes it, see `monarch_nb.logs.spool`
    runner: str = ""  # its main function, as `module:function`
    python: str | None = None  # the requested interpreter


class Launch(msgspec.Struct, frozen=True):
    """A user's own command line that becomes a process."""

    program: str
    arg0: str | None = None
    args: tuple[str, ...] = ()
    env: Environment = {}
    inherit_env: bool = True


class SpawnProcs(msgspec.Struct, frozen=True, kw_only=True):
    """agent.spawn: start `ranks` of a proc mesh on this host.

    `env`, `proc_bind` and `launch` hold one entry for each rank, one entry for all, or nothing. `owner` defaults to the
    sender.
    """

    mesh: str  # its uid
    ranks: tuple[int, ...]
    incarnations: tuple[int, ...] = ()
    owner: str = ""
    name: str = ""
    env: tuple[Environment, ...] = ()
    proc_bind: tuple[dict[str, str], ...] = ()
    launch: tuple[Launch, ...] = ()
    python: str | None = None
    bootstrap_env_cold: bool = False  # never fork from the template
    heavy: bool = True  # wait for the template's imports, rather than begin without them
    cwd: str | None = None
    sys_path: tuple[str, ...] = ()
    setup: int = 0
    runner: str = ""  # its main function, as `module:function`


class KeepSpares(msgspec.Struct, frozen=True, kw_only=True):
    """agent.spares: keeps `count` processes started for later starts of a mesh, with its last process or its owner.

    They call `prepare`, given as `module:function`.
    """

    mesh: str
    owner: str
    count: int
    prepare: str


class SpawnReply(msgspec.Struct, frozen=True):
    """Reply to agent.spawn: the procs that are being started; proc.started or proc.exited follows for each."""

    addresses: tuple[str, ...]


def observers(watchers: Iterable[str], owner: str) -> list[str]:
    """Returns the watchers of a process that display it: its owner, and controllers. Ranks are sent only its end: each
    rank watches all others of its mesh, so anything more would be as many messages as there are pairs of ranks."""
    return [watcher for watcher in watchers if watcher == owner or not parse_address(watcher).is_proc]


class StartedProc(msgspec.Struct, frozen=True, kw_only=True):
    """proc.started: a process exists and has received its specification."""

    address: str
    pid: int
    how: str  # "fork", "spare" or "cold"
    why: str = ""  # why not "fork"
    seconds: float = 0.0  # from the request to the process's first message
    log: str = ""  # the file on its host with all it writes


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """proc.exited: a process has ended, or has failed to start."""

    address: str
    host: str
    reason: str
    pid: int = 0
    exitcode: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()
    dump: tuple[str, ...] = ()  # faulthandler's, of the thread that crashed
    oom: bool = False
    memory: str = ""  # its memory before memory ran out
    expected: bool = False  # its end was requested
    evicted: bool = False  # its agent has ended it without its owner's request
    host_ends: bool = False  # its agent ends as well, and with it the host
    at: float = 0.0  # wall clock, seconds
    log_bytes: int = 0  # how much of its output the agent may still have


class Addresses(msgspec.Struct, frozen=True):
    """agent.watch: addresses of processes."""

    addresses: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True):
    """agent.stop: proc.stop to each, SIGTERM after `timeout_s`, SIGKILL `grace_s` later. Replies after their ends."""

    addresses: tuple[str, ...]
    timeout_s: float = 10.0
    reason: str = ""
    grace_s: float = 1.0


class ProcStop(msgspec.Struct, frozen=True):
    """proc.stop: the proc should end by itself within `timeout_s`."""

    reason: str = ""
    timeout_s: float = 10.0


class Kill(msgspec.Struct, frozen=True):
    """agent.kill: send a signal, at once."""

    addresses: tuple[str, ...]
    signal: int = 9


class AskSamples(msgspec.Struct, frozen=True):
    """agent.samples: requests the system's state of these procs."""

    addresses: tuple[str, ...]


class ProcSample(msgspec.Struct, frozen=True):
    """The state of a proc according to the system."""

    letter: str  # of its state: "T" stopped by a signal, "S" asleep...; "" where it is not known
    processor: float  # seconds that all its threads have used; NaN where it is not known


class ProcSamples(msgspec.Struct, frozen=True):
    """Reply to agent.samples, of the procs that live, by address."""

    procs: dict[str, ProcSample]


class StopReply(msgspec.Struct, frozen=True):
    """Reply to agent.stop: how each proc ended."""

    exits: tuple[Exited, ...]


class Shutdown(msgspec.Struct, frozen=True):
    """agent.shutdown: stop every proc, reply, end."""

    timeout_s: float = 3.0
    reason: str = "the host was shut down"


class Hosts(msgspec.Struct, frozen=True):
    """agent.hosts: routes to other hosts, which replace earlier ones.

    Endpoints are `tcp://...` of an agent or `ipc://<run folder>` on this machine; a via is the process address of
    whoever forwards messages, that of host "" to all other hosts. `incarnations` has the incarnations of the hosts'
    agents where they are known.
    """

    endpoints: dict[str, str]
    vias: dict[str, str] = {}
    incarnations: dict[str, int] = {}


class HostsLost(msgspec.Struct, frozen=True):
    """agent.lost: lost hosts, with the reasons. Passed on to processes as host.lost.

    `incarnations` has those of the agents that have ended: later agents are not affected. `losses` numbers the losses,
    which the same agent may survive: processes that were healed after a loss are not affected.
    """

    hosts: dict[str, str]
    incarnations: dict[str, int] = {}
    losses: dict[str, int] = {}


class RelayChanged(msgspec.Struct, frozen=True):
    """relays.changed: messages to other hosts through `relay` take another route now; some may be lost with it."""

    relay: str


class AskCasts(msgspec.Struct, array_like=True, frozen=True):
    """relays.casts: requests the states of casts that the sender sent to this agent, by the ports of their replies.

    If it is `final`, casts that have not arrived will not be executed.
    """

    ports: tuple[int, ...]
    final: bool


class CastState(msgspec.Struct, array_like=True, frozen=True):
    """An agent's state of a cast: whether it arrived, and the positions whose replies it has not passed on yet.

    `waiting` is None where it is about to try again to pass some on.
    """

    came: bool
    waiting: tuple[int, ...] | None = ()

    def waits_for(self, position: int) -> bool:
        """Returns whether the reply for a position may still arrive."""
        return self.waiting is None or position in self.waiting


class CastStates(msgspec.Struct, array_like=True, frozen=True):
    """The state of each cast, in the order of the request."""

    states: tuple[CastState, ...]


class PreemptionNotice(Harmless, frozen=True, kw_only=True):
    """host.notice: the sender's host is about to be ended or, if it is `over`, has not been ended.

    `by` is the source, `seconds` the time that was left when it was sent, None if unknown. `at` is the time of the
    notice by the host's clock, the same in all messages about it. The agent's worker writes it on its pipe.
    """

    by: str
    seconds: float | None = None
    at: float = 0.0
    over: bool = False


class KeyChange(msgspec.Struct, frozen=True):
    """agent.key: one step in the change of a job's key to `key`, the content of a key file.

    "expect": a peer that refuses one of the two is dialled with the other. "use": only the new one is accepted, and the
    key file is replaced. "done": the old one is forgotten. "cancel": the new one is, unless it is used.
    """

    step: KeyStep
    key: str


class KeyChanged(Harmless, frozen=True, kw_only=True):
    """Reply to agent.key: other controllers with something on the host, and why its key file cannot be replaced."""

    users: tuple[str, ...] = ()
    error: str = ""


class OwnerLease(msgspec.Struct, frozen=True):
    """agent.lease: `owner` lives; unless it renews the lease within `seconds` its processes are stopped.

    An owner on the agent's machine gives its `pid`, and its end is noticed at once.
    """

    owner: str = ""
    seconds: float = 60.0
    pid: int = 0


class MeshHolder(Harmless, frozen=True, kw_only=True):
    """The holder of a mesh, as other controllers see it."""

    address: str
    pid: int
    machine: str
    what: str = "another program"  # such as "the kernel of train.ipynb"
    since: float = 0.0  # wall clock, seconds
    system: str = ""  # the scope of its pid: the machine since its boot, and the name space of pids
    started: int = 0  # of the process, in clock ticks since the boot; 0: not known


class Unwatched(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a mesh while it has no controller: "module:function" of this library, and names.

    `elsewhere` are the addresses of its processes on other hosts, for the agent that inspects all of them.
    """

    diagnoser: str
    extent: dict[str, int]
    actors: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a diagnosis that an agent has made; times are of the wall clock."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    source: str = ""
    sure: bool = True
    first: float
    last: float
    times: int = 1  # that it was found


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """agent.hold: the record of a mesh that can be detached; with `keep` it is, for `seconds`, when its owner ends.

    `meshes` are the uids of the processes and of the actors on them; `parts` makes the mesh usable by another
    controller, by part, opaque to the agent (an empty part is deleted); `file` is the mesh's file. `grant` and `turn`
    are those with which the owner has attached it, which a restarted agent cannot know. `unwatched` says how
    agents diagnose it while it is detached.
    """

    uid: str
    name: str
    secret: str
    seconds: float
    keep: bool
    holder: MeshHolder
    meshes: tuple[str, ...] = ()
    parts: dict[str, bytes] = {}
    file: str = ""
    grant: int = 0
    turn: int = 0
    unwatched: Unwatched | None = None


class Detach(msgspec.Struct, frozen=True):
    """agent.detach: the owner detaches a mesh, which lives on until its lease ends or a controller attaches it."""

    uid: str
    why: str = "it was detached"
    unread: tuple[int, ...] = ()  # as in `Header.unread`, of the calls that have no result yet


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """agent.attach: the sender wants a mesh. `grant` and `turn` are the first host's, 0 for that host itself."""

    uid: str
    secret: str
    holder: MeshHolder
    steal: bool = False
    ended: str = ""  # the address of a holder that has ended, according to the sender
    grant: int = 0
    turn: int = 0


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to agent.attach: the mesh is the sender's; with all that it needs, and events of the time meanwhile."""

    host: str = ""  # that answers; set by the receiver
    grant: int = 0
    turn: int = 0
    left_at: float = 0.0
    why: str = ""
    parts: dict[str, bytes] = {}
    procs: "tuple[ProcStatus, ...]" = ()
    logs: dict[str, str] = {}  # the log file of each proc
    exits: tuple[Exited, ...] = ()
    findings: tuple[RunFinding, ...] = ()  # of the agent since it was detached
    notices: "tuple[PreemptionNotice, ...]" = ()  # of its host since it was detached, with current `seconds`
    before: MeshHolder | None = None  # the previous holder
    known: bool = True  # False for an agent that was restarted, or has observed its end, and has nothing of it


class DropMesh(msgspec.Struct, frozen=True):
    """agent.drop: the owner of a mesh had lost this host; stops these incarnations and does not hold the mesh."""

    uid: str
    secret: str
    incarnations: dict[int, int]  # the lost incarnation of each rank here


class Stolen(msgspec.Struct, frozen=True):
    """controller.stolen: another controller has taken over a mesh from the receiver."""

    uid: str
    by: MeshHolder


class NewOwner(msgspec.Struct, frozen=True, kw_only=True):
    """proc.owner: the new owner of these meshes, or "" while they are detached. Later turns win."""

    meshes: tuple[str, ...]
    owner: str
    turn: int
    unread: tuple[int, ...] = ()  # of the calls of the owner that detaches, as in `Header.unread`


class UndeliveredReply(Harmless, frozen=True, kw_only=True):
    """A reply that had no receiver."""

    PROSE: ClassVar = ("error",)

    mesh: str
    rank: int
    endpoint: str
    at: float
    well: bool
    stored: bool = False  # whether its value is stored
    error: str = ""  # in a line


class ActorThere(msgspec.Struct, frozen=True, array_like=True):
    """The latest incarnation of an actor that a process knows."""

    mesh: str
    rank: int
    incarnation: int
    end: bytes = b""  # the reason of its end, an encoded `supervision.Cause`; empty while it lives


class Welcome(msgspec.Struct, frozen=True):
    """Reply to proc.owner: facts for a new owner."""

    missed: tuple[UndeliveredReply, ...] = ()
    running: tuple[tuple[str, int, str, float], ...] = ()  # mesh, rank, endpoint, since (wall clock)
    actors: tuple[ActorThere, ...] = ()
    bare: bool = False  # whether its set-up never arrived, since its starter has ended


class Responsiveness(msgspec.Struct, frozen=True):
    """proc.unresponsive, proc.responsive: silent or answering processes by address, and since when (wall clock)."""

    since: dict[str, float]


class ProcStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process as its agent sees it."""

    address: str
    pid: int
    state: str  # starting, running, stopping, exited
    owner: str
    name: str = ""
    how: str = ""
    why: str = ""
    started_at: float = 0.0
    unresponsive_since: float | None = None
    exit: Exited | None = None


class HostState(Harmless, frozen=True, kw_only=True):
    """Reply to agent.status."""

    host: str
    pid: int
    procs: tuple[ProcStatus, ...]
    template_pid: int | None = None
    template_threads: int | None = None
    template_seconds: float | None = None  # from its start to its first words
    template_error: str = ""
    python: str = ""
    version: str = ""  # of monarch_nb
    torch: str = ""  # its version with its CUDA, "" where it is not installed
    incarnation: int = 0  # which incarnation of this agent: a larger one after each start
    lease_s: float = 0.0  # how long processes of a silent owner live


class IdentifyReply(msgspec.Struct, frozen=True):
    """Reply to controller.who, sent by a dialling agent with its HostState: the controller to join, or the error."""

    address: str = ""
    error: str = ""


class Introduce(msgspec.Struct, frozen=True):
    """agent.introduce: connect the sender, which cannot dial it, with the host at a TCP endpoint."""

    endpoint: str
    timeout_s: float = 10.0


class IntroduceReply(msgspec.Struct, frozen=True):
    """Reply to agent.introduce: the host at the endpoint, or the error.

    Later host.cut (a HostsLost) reports a broken connection to such a host to the sender.
    """

    state: HostState | None = None
    error: str = ""
    nobody: bool = False  # True if the machine is there but nothing listens at the port


class AgentReady(msgspec.Struct, frozen=True, kw_only=True):
    """The line an agent prints, as JSON, once it listens."""

    host: str
    pid: int
    address: str
    endpoint: str | None
    run_folder: str
    python: str
    version: str
    incarnation: int = 0
