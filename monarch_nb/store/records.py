"""The state of the cluster as JSON: docs/protocol.md describes these records, and the front ends have the same."""

from typing import Any, Literal, TypedDict

RankState = Literal["starting", "idle", "busy", "paused", "unresponsive", "healing", "failed", "stopped"]
FailureState = Literal["open", "healing", "healed", "stopped", "raised"]


class HostFields(TypedDict, total=False):
    """A host."""

    name: str
    state: Literal["up", "lost"]
    why: str
    notice: str
    until: float


_Classed = TypedDict("_Classed", {"class": str}, total=False)  # a keyword cannot be an attribute


class MeshFields(_Classed, total=False):
    """A mesh of processes or actors."""

    name: str
    kind: Literal["procs", "actors"]
    labels: list[str]
    sizes: list[int]
    offset: int
    strides: list[int]
    picked: list[int]
    state: RankState
    born: float
    owner: str
    mine: bool
    counts: dict[str, int]
    hosts: list[str]
    per_host: int
    on: str
    inner: bool
    stopped: str
    ended: float
    unheld: float


class RankFields(TypedDict, total=False):
    """A rank; without a field, the state is that of its mesh."""

    state: RankState
    since: float
    endpoint: str
    detail: str
    failure: str
    incarnation: int
    pid: int
    queue: int
    calls: int
    rate: float
    errors: int
    cpu: float
    memory: int
    memory_kind: str
    gpu: float
    gpu_memory: int
    gpu_total: int


class FailureFields(TypedDict, total=False):
    """Failures of one event; in an event None stands for an unknown value, and the state has no such field."""

    mesh: str
    ranks: list[int]
    name: str
    kind: Literal["procs", "actors"]
    where: str
    title: str
    cause: str
    text: str | None
    ended_by: str | None
    host: str | None
    pid: int | None
    exitcode: int | None
    signal: int | None
    processes: list[list[Any]] | None  # a host, and process ids there
    oom: bool | None
    memory: str | None
    at: float
    detected: float
    traceback: str | None
    last_lines: list[str] | None
    lines: list[list[Any]] | None  # ranks, and their last lines
    texts: list[list[str]] | None  # ranks, and the errors that they raised
    dump: list[str] | None
    told: list[list[str]]  # notified owners, and the results
    also: list[str] | None
    next: str
    report: str
    state: FailureState
    ended: float | None
    call: str


class SessionFields(TypedDict, total=False):
    """A rank that is stopped in the debugger."""

    mesh: str
    rank: int
    actor: str
    file: str
    line: int
    function: str
    place: str
    since: float


class Document(TypedDict):
    """The whole state: records by section and key."""

    hosts: dict[str, HostFields]
    meshes: dict[str, MeshFields]
    ranks: dict[str, dict[str, RankFields]]  # of a mesh, by index
    failures: dict[str, FailureFields]
    sessions: dict[str, SessionFields]
    detached: dict[str, dict[str, object]]
    tensors: dict[str, dict[str, object]]
    transfers: dict[str, dict[str, object]]
