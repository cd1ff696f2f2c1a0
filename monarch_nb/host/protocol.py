"""Bodies of the CONTROL messages between host agents, procs and controllers: msgspec structs, never pickles."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from monarch_nb.wire.address import parse_address
from monarch_nb.wire.texts import Harmless

Environment = dict[str, str | None]  # laid over the agent's own environment; None removes a name


class ProcSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one proc is told at its start."""

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
    log: str = ""  # where its output lies until the agent takes it: files of that name, see `monarch_nb.logs.marks`
    runner: str = ""  # what it runs, as `module:function`
    python: str | None = None  # the interpreter it was asked to run


class Launch(msgspec.Struct, frozen=True):
    """A command line of the user's own that becomes a proc."""

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

    mesh: str  # its uid: where its other ranks are is no matter of this host's
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
    runner: str = ""  # what it runs, as `module:function`


class Spawning(msgspec.Struct, frozen=True):
    """Reply to agent.spawn: the procs that are being started; proc.started or proc.exited follows for each."""

    addresses: tuple[str, ...]


def observers(watchers: Iterable[str], owner: str) -> list[str]:
    """Those of a proc's watchers that show how it is: its owner, and controllers. Ranks learn of its end alone: each
    rank watches all others of its mesh, so anything more would be as many messages as there are pairs of ranks."""
    return [watcher for watcher in watchers if watcher == owner or not parse_address(watcher).is_proc]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """proc.started: a process exists and has been told its spec."""

    address: str
    pid: int
    how: str  # "fork" or "cold"
    why: str = ""  # why not "fork"
    seconds: float = 0.0  # from the request to the process's first words
    log: str = ""  # the file on its host that all it writes is kept in


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """proc.exited: a process is gone, or never came to be."""

    address: str
    host: str
    reason: str
    pid: int = 0
    exitcode: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()
    dump: tuple[str, ...] = ()  # faulthandler's, of the thread that crashed
    oom: bool = False
    expected: bool = False  # somebody asked for it
    evicted: bool = False  # its agent has ended it, though who owns it did not ask for that
    at: float = 0.0  # wall clock, seconds
    log_bytes: int = 0  # what of its output the agent still has, or may have


class Addresses(msgspec.Struct, frozen=True):
    """agent.watch: which procs."""

    addresses: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True):
    """agent.stop: proc.stop to each, SIGTERM after `timeout_s`, SIGKILL `grace_s` later. Replies when all are gone."""

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


class Ended(msgspec.Struct, frozen=True):
    """Reply to agent.stop: how each proc ended."""

    exits: tuple[Exited, ...]


class Shutdown(msgspec.Struct, frozen=True):
    """agent.shutdown: stop every proc, reply, end."""

    timeout_s: float = 3.0
    reason: str = "the host was shut down"


class Hosts(msgspec.Struct, frozen=True):
    """agent.hosts: ways to other hosts, which replace earlier ones.

    Endpoints are `tcp://...` of an agent or `ipc://<run folder>` on this machine; a via is the process address of
    whoever passes messages on, that of host "" to all hosts of which nothing else is known. `incarnations` tells which
    incarnation of an agent is there, where that is known.
    """

    endpoints: dict[str, str]
    vias: dict[str, str] = {}
    incarnations: dict[str, int] = {}


class Lost(msgspec.Struct, frozen=True):
    """agent.lost: these hosts are gone with all that ran there, and why. Passed on to procs as host.lost.

    `incarnations` tells which incarnation of an agent has ended: a later one, that is known by then, is not meant.
    `losses` numbers the loss, which the same agent may survive: processes that were healed after it are not meant.
    """

    hosts: dict[str, str]
    incarnations: dict[str, int] = {}
    losses: dict[str, int] = {}


class Notice(Harmless, frozen=True, kw_only=True):
    """host.notice: the engine of the sender's host is about to end it, or, where it is `over`, has not done so.

    `by` says who, `seconds` how many were left when it was sent: None where nobody knows. `at` is when the notice came,
    by the host's clock, the same in all that is told of one. The worker that keeps an agent writes it on its pipe.
    """

    by: str
    seconds: float | None = None
    at: float = 0.0
    over: bool = False


class Lease(msgspec.Struct, frozen=True):
    """agent.lease: `owner` lives; without another word within `seconds` its procs are stopped.

    An owner on the agent's machine gives its `pid`, and its end is noticed at once.
    """

    owner: str = ""
    seconds: float = 60.0
    pid: int = 0


class Holder(Harmless, frozen=True, kw_only=True):
    """Who holds a mesh, as the next one who wants it is told."""

    address: str
    pid: int
    machine: str
    what: str = "another program"  # it is: "the kernel of train.ipynb"
    since: float = 0.0  # wall clock, seconds
    system: str = ""  # where its pid means it: the machine since its start, and the name space of pids


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """agent.hold: a mesh that can be left. `keep`: it is, for `seconds`, when its owner ends.

    `meshes` are the uids of the procs and of the actors on them; `parts` is what makes the mesh usable by another
    controller, by part, opaque to the agent (an empty part is taken out); `file` is the mesh's file. `grant` and `turn`
    are those with which the owner has got it, which an agent that was started anew cannot know.
    """

    uid: str
    name: str
    secret: str
    seconds: float
    keep: bool
    holder: Holder
    meshes: tuple[str, ...] = ()
    parts: dict[str, bytes] = {}
    file: str = ""
    grant: int = 0
    turn: int = 0


class Detach(msgspec.Struct, frozen=True):
    """agent.detach: the owner of a mesh leaves it, and it lives on until its lease ends or somebody attaches it."""

    uid: str
    why: str = "it was detached"


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """agent.attach: the sender wants a mesh. `grant` and `turn` are the first host's, 0 when that is asked."""

    uid: str
    secret: str
    holder: Holder
    steal: bool = False
    ended: str = ""  # the address of a holder that has ended, as the sender sees
    grant: int = 0
    turn: int = 0


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to agent.attach: the mesh is the sender's. What is needed to use it, and what has happened meanwhile."""

    host: str = ""  # that answers, as who has asked knows it
    grant: int = 0
    turn: int = 0
    left_at: float = 0.0
    why: str = ""
    parts: dict[str, bytes] = {}
    procs: "tuple[ProcState, ...]" = ()
    logs: dict[str, str] = {}  # the log file of each proc
    exits: tuple[Exited, ...] = ()
    notices: "tuple[Notice, ...]" = ()  # to its host since it was left, `seconds` as they are now
    before: Holder | None = None  # whom it was taken from
    known: bool = True  # not to an agent that was started anew, or that has seen it end: it has nothing of it


class Drop(msgspec.Struct, frozen=True):
    """agent.drop: the owner of a mesh had lost this host. The mesh is not kept here, and these incarnations stopped."""

    uid: str
    secret: str
    incarnations: dict[int, int]  # of each rank here, the one that was lost


class Stolen(msgspec.Struct, frozen=True):
    """controller.stolen: somebody else has a mesh now that the receiver held."""

    uid: str
    by: Holder


class NewOwner(msgspec.Struct, frozen=True, kw_only=True):
    """proc.owner: who owns these meshes from now on; nobody, for a time, where `owner` is "". Later turns count."""

    meshes: tuple[str, ...]
    owner: str
    turn: int


class Missed(Harmless, frozen=True, kw_only=True):
    """An answer that nobody was there to hear."""

    PROSE: ClassVar = ("error",)

    mesh: str
    rank: int
    endpoint: str
    at: float
    well: bool
    kept: bool = False  # it is there for who asks
    error: str = ""  # in a line


class ActorThere(msgspec.Struct, frozen=True, array_like=True):
    """The latest incarnation of an actor that a process knows of."""

    mesh: str
    rank: int
    incarnation: int
    end: bytes = b""  # why it has ended, an encoded `supervision.Cause`; empty while it lives


class Welcome(msgspec.Struct, frozen=True):
    """Reply to proc.owner: what is of interest to a new owner."""

    missed: tuple[Missed, ...] = ()
    running: tuple[tuple[str, int, str, float], ...] = ()  # mesh, rank, endpoint, since (wall clock)
    actors: tuple[ActorThere, ...] = ()
    bare: bool = False  # its set-up has never come: who started it is gone


class Silent(msgspec.Struct, frozen=True):
    """proc.unresponsive, proc.responsive: since when (wall clock) living procs, by address, have not answered."""

    since: dict[str, float]


class ProcState(msgspec.Struct, frozen=True, kw_only=True):
    """One proc as its agent sees it."""

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
    procs: tuple[ProcState, ...]
    template_pid: int | None = None
    template_threads: int | None = None
    template_seconds: float | None = None  # from its start to its first words
    template_error: str = ""
    python: str = ""
    version: str = ""  # of monarch_nb
    torch: str = ""  # its version with its CUDA, "" where it is not installed
    incarnation: int = 0  # which incarnation of this agent: a larger one after each start
    lease_s: float = 0.0  # how long procs of a silent owner live


class Who(msgspec.Struct, frozen=True):
    """Reply to controller.who, which a dialling agent asks with its HostState: where to join, or why it cannot."""

    address: str = ""
    error: str = ""


class Introduce(msgspec.Struct, frozen=True):
    """agent.introduce: lead the sender, who cannot dial it, to the host at a TCP endpoint, and that host back."""

    endpoint: str
    timeout_s: float = 10.0


class Introduced(msgspec.Struct, frozen=True):
    """Reply to agent.introduce: who answers there, or what is wrong.

    Later host.cut (a Lost) tells the sender when the connection to such a host breaks.
    """

    state: HostState | None = None
    error: str = ""
    nobody: bool = False  # the machine is there, but nobody listens at the port


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The line an agent prints, as JSON, once it listens."""

    host: str
    pid: int
    address: str
    endpoint: str | None
    run_folder: str
    python: str
    version: str
    incarnation: int = 0
