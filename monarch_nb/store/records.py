"""The state of the cluster as JSON, and the document that holds it, with its changes since the last patch.

docs/protocol.md describes these records, and the front ends have the same.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

SECTIONS = ("hosts", "meshes", "ranks", "failures", "sessions", "detached", "tensors", "transfers")

RankState = Literal["starting", "idle", "busy", "paused", "unresponsive", "healing", "failed", "stopped"]
FailureState = Literal["open", "healing", "healed", "stopped", "raised"]

Patch = dict[str, Any]


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


def apply(state: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """Changes `state` by a patch, in place, and returns it."""
    for key, value in patch.items():
        if value is None:
            state.pop(key, None)
        elif isinstance(value, dict):
            inner = state.get(key)
            state[key] = apply(inner if isinstance(inner, dict) else {}, value)
        else:
            state[key] = value
    return state


class Board:
    """Records every write in the document and in the pending patch. Removed objects stay removed."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}
        self.document = cast(Document, self._sections)  # sections are named at run time
        self._pending: Patch = {}
        self._removed: dict[tuple[str, str], dict[str, set[str]]] = {}  # fields of objects removed since the last patch

    def take(self) -> Patch:
        """Returns the patch since the last call; {} if nothing has changed."""
        patch, self._pending = self._pending, {}
        self._removed.clear()
        return patch

    def put(self, section: str, key: str, value: Mapping[str, object] | None) -> None:
        """Writes or, with None, removes a whole object."""
        objects = self._sections[section]
        before = objects.pop(key, None)
        if value is None and before is None:
            return
        removed = self._removed.setdefault((section, key), {})
        for name, inner in (before or {}).items():
            removed.setdefault(name, set()).update(inner if isinstance(inner, dict) else ())
        pending = self._pending.setdefault(section, {})
        if value is None:
            pending[key] = None
            return
        objects[key] = stored = value if isinstance(value, dict) else dict(value)
        # The patch is merged into a view's copy: fields that no longer exist must be set to None.
        patch = {**dict.fromkeys(removed.keys() - stored.keys()), **_copy(stored)}
        for name, inner in patch.items():
            if isinstance(inner, dict) and name in removed:
                patch[name] = {**dict.fromkeys(removed[name] - inner.keys()), **inner}
        pending[key] = patch

    def change(self, section: str, key: str, fields: Mapping[str, object]) -> None:
        """Writes fields of an existing object; None removes a field. Unchanged fields are left out of the patch."""
        current = self._sections[section].get(key)
        if current is not None:
            self._write(current, fields, section, key)

    def change_in(self, section: str, key: str, part: str, fields: Mapping[str, object]) -> None:
        """Does the same as `change` for an object inside an object."""
        current = self._sections[section].get(key)
        if current is not None:
            self._write(current[part], fields, section, key, part)

    def change_rank(self, uid: str, index: str, fields: Mapping[str, object]) -> None:
        """Does the same as `change` for a rank of a mesh, whose object is created when needed."""
        ranks = self._sections["ranks"].get(uid)
        if ranks is None:
            return
        current = ranks.get(index)
        if current is None:
            fields = {name: value for name, value in fields.items() if value is not None}
            if not fields:
                return
            current = ranks[index] = {}
        self._write(current, fields, "ranks", uid, index)

    def _write(self, current: dict[str, object], fields: Mapping[str, object], *path: str) -> None:
        patch: Patch | None = None
        for name, value in fields.items():
            if current.get(name) == value:
                continue
            if patch is None:
                patch = self._pending_at(path)
            if value is None:
                current.pop(name, None)
            else:
                current[name] = value
            patch[name] = value

    def _pending_at(self, path: tuple[str, ...]) -> Patch:
        patch: Patch = self._pending
        for key in path:
            inner = patch.get(key)
            if inner is None:
                inner = patch[key] = {}
            patch = inner
        return patch


def _copy(value: dict[str, object]) -> dict[str, object]:
    """Returns a copy for the patch, which must not change with the document."""
    return {key: _copy(inner) if isinstance(inner, dict) else inner for key, inner in value.items()}
