"""Distribution of edited code: files to hosts that lack them, modules to processes, new classes to living actors.

Actors adopt a class between messages, and keep their state.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import secrets
import shutil
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from msgspec import Struct, field

from monarch_nb._package import more
from monarch_nb.code.modules import Newest, newest, reload_edited
from monarch_nb.mesh import ValueMesh
from monarch_nb.mesh.actor import ActorMesh, check_class, init_of
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.host import HostMesh, host_labels, spawn_helpers
from monarch_nb.mesh.proc import ProcMesh, get_active_proc_meshes
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import gather, request, settle
from monarch_nb.mesh.sending import encode_arguments, send_region
from monarch_nb.mesh.verbs import NEW_CLASS, NewClass
from monarch_nb.runtime import (
    RELOAD,
    ActorState,
    Future,
    PendingCall,
    Runtime,
    Thunk,
    current_runtime,
    kind_of,
    resolve_future,
)
from monarch_nb.shape import NDSlice, Region
from monarch_nb.supervision import Driver
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, Done, decode, encode, error_line, text_of, travels_by_value

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE = 5.0  # seconds to wait for holders of references to an actor mesh
MOST_BYTES = 256 << 20  # of one workspace, which holds code, not data
_SKIPPED = frozenset({"__pycache__", "node_modules"})  # folders that are not part of a workspace


# -- classes of living actors ------------------------------------------------------------------------------------------


def reload_mesh(mesh: object, cls: type | None = None) -> Future[None]:
    """Gives the actors of a mesh the newest definition of their class, or `cls`; their state stays.

    The reload is a message in order: calls sent before run with the old class, calls sent after with the new one. An
    actor's `__reload__(old_class)` runs when it has the new class. The class of a module whose file was edited is read
    from that file. The future resolves when all holders of references to the mesh know the class too.
    Warns when `__init__` has changed, since that is not run again. Raises TypeError when the two cannot be swapped
    (other `__slots__`, sync against async): spawn anew then. Raises SupervisionError for a mesh with failed ranks.
    """
    if not isinstance(mesh, ActorMesh):
        raise TypeError(f"reload_mesh takes an actor mesh, not {type(mesh).__name__}")
    state, region = state_of(mesh), region_of(mesh)
    if state.spawn_spec is None:
        raise RuntimeError(f"{state.name} was spawned by another process: reload it there")
    if len(region) != len(state.region):
        raise ValueError(f"reload the whole of {state.name}, not a slice: its ranks would run different classes")
    old, new = state.cls, cls or _newest(state)
    problem = objection(state, new)
    if problem:
        raise TypeError(f"{problem}: spawn a new mesh")
    if _init(old) != _init(new):
        warnings.warn(
            f"{new.__name__}.__init__ has changed, but it does not run again: the living actors of {state.name} "
            "lack what it sets now. Set that in __reload__(self, old), or spawn a new mesh"
            + more("manual/editing.md#a-class-from-a-cell-or-a-script"),
            stacklevel=2,
        )
    runtime = current_runtime()
    call = PendingCall(
        runtime, f"{state.name}.{RELOAD}", state.uid, region.ranks, len(region), lambda replies: _check_all(replies)
    )
    try:
        broken = runtime.supervisor.check(state, region, call)
        if broken is not None:
            raise broken
        frames = encode_arguments(call.title, (Newest(new),), {})
        state.cls = new
        if state.spawn_spec is not None:
            state.spawn_spec.cls = new
        send_region(runtime, runtime.context(), state, region, RELOAD, frames, pending=call)
    except BaseException:
        call.close()
        raise
    published = runtime.part(ClassVersions).publish(state)
    return gather([call.future, published], lambda: f"{state.name} does not have its new class on all ranks yet")


def _check_all(replies: list[Thunk]) -> None:
    for reply in replies:
        reply()


def _code(code: types.CodeType) -> tuple[object, ...]:
    """Returns a comparable value of a function's code, without line numbers."""
    consts = tuple(_code(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, consts


def _init(cls: type) -> object:
    method = init_of(cls)
    return (_code(method.__code__), repr(method.__defaults__)) if inspect.isfunction(method) else None


def _newest(state: ActorState) -> type:
    """Returns the current definition of the class, from its file if that was edited."""
    cls = state.cls
    if not travels_by_value(cls):
        newest(cls.__module__, cls.__qualname__)
    return cls if state.spawn_spec is None else state.spawn_spec.newest()


def objection(state: ActorState, new: type) -> str:
    """Returns why living actors cannot adopt a class; "" if they can. Raises ValueError if it is no actor class."""
    check_class(new)
    if kind_of(new) != state.kind:
        return f"{new.__name__} is {kind_of(new)} now and was {state.kind}"
    if getattr(new, "__slots__", None) != getattr(state.cls, "__slots__", None):
        return f"the __slots__ of {new.__name__} have changed, which living objects cannot follow"
    return ""


class ClassVersions:
    """Sends new classes of this process's meshes to holders of references, and applies received ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.holders: dict[str, set[str]] = {}  # the processes that hold references to a mesh, by its uid
        self._newest: dict[str, NewClass] = {}
        self._runtime.verbs.handle(NEW_CLASS, self._arrived)

    def publish(self, state: ActorState) -> Future[None]:
        """Sends the new class of a mesh to all holders. Resolves when they have it, or after `PATIENCE`."""
        with state.lock:
            state.edition += 1
            frames = tuple(bytes(frame) for frame in encode(Newest(state.cls), self._runtime))
            message = self._newest[state.uid] = NewClass(state.uid, state.edition, state.kind, frames)
        requests: list[Future[object]] = [
            request(self._runtime, holder, NEW_CLASS, message) for holder in tuple(self.holders.get(state.uid, ()))
        ]
        done = settle(requests, lambda: f"some processes that refer to {state.name} do not have its new class yet")
        if requests:
            self._runtime.later(PATIENCE, lambda: resolve_future(done, None))
        return done

    def greet(self, holder: str, uid: str) -> None:
        """Sends a new holder the current class, since its reference may be older."""
        message = self._newest.get(uid)
        if message is not None:
            try:
                self._runtime.post(holder, NEW_CLASS, message)
            except UnreachableError:
                return

    # -- at the holders ---------------------------------------------------------------------------------------------

    def _arrived(self, message: NewClass, asker: Asker[Done]) -> None:
        # Unpickling a class may import what it needs; the reading thread runs no user code.
        threading.Thread(target=self._take, args=(message, asker), name="monarch-class", daemon=True).start()

    def _take(self, message: NewClass, asker: Asker[Done]) -> None:
        try:
            state = self._runtime.meshes.get(message.uid)
            if isinstance(state, ActorState) and message.edition > state.edition:
                cls = decode(message.frames, self._runtime)
                with state.lock:
                    if message.edition > state.edition:
                        state.cls, state.kind, state.edition = cls, message.kind, message.edition
        except Exception as error:
            logger.warning("a reloaded class cannot be used here", exc_info=True)
            asker.refuse(error_line(error))
        else:
            asker.reply(Done())


class Report(Struct):
    """Result of a reload: modules reloaded anywhere, actor meshes with a new class, and errors."""

    modules: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.modules and not self.meshes:
            return "nothing has changed"
        parts = [f"reloaded {', '.join(self.modules)}"] if self.modules else []
        parts += [f"actors with the new class: {', '.join(self.meshes)}"] if self.meshes else []
        lines = [line for note in self.notes for line in note.splitlines()]
        return "\n".join(["; ".join(parts), *dict.fromkeys(lines)])  # without duplicates of several meshes


# -- modules and actors ------------------------------------------------------------------------------------------------


def reload_code(
    roots: Sequence[str] = (),
    *,
    also: Sequence[str] = (),
    procs: "Sequence[ProcMesh] | None" = None,
    paths: "dict[str, list[str]] | None" = None,
) -> Report:
    """Loads edited modules again, here and in all processes spawned from here (or those of `procs`), and gives actors
    whose classes come from them the new classes, between messages. Blocks.

    `roots` are folders; without any, all local modules are checked. `also` names modules to load in any case; `paths`
    gives, by host, the folders that come first on the path of processes there. Raises SyntaxError before anything
    has changed anywhere, and errors that modules raise while they are loaded.
    """
    meshes = get_active_proc_meshes() if procs is None else list(procs)
    reloaded = dict.fromkeys(reload_edited(roots, also).modules)
    reloaded.update(dict.fromkeys(_everywhere(meshes, _refresh, paths or {}, tuple(roots), tuple(also))))
    report = Report(tuple(reloaded))
    if reloaded:
        changed = frozenset(reloaded)
        reload_actors(changed, report)
        for names, notes in _everywhere(meshes, _reload_owned, changed):
            report.meshes += tuple(name for name in names if name not in report.meshes)
            report.notes += [note for note in notes if note not in report.notes]
    return report


def _everywhere(
    meshes: Sequence[ProcMesh], function: Callable[P, list[T]], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Runs a function in all processes of some meshes; returns their results in one list."""
    futures = [future for mesh in meshes for future in _on_living(mesh, function, *args, **kwargs)]
    return [answer for future in futures for answers in future.get().values() for answer in answers]


def reload_actors(changed: frozenset[str], report: Report) -> None:
    """Gives the actor meshes of this process whose classes come from these modules the newest classes."""
    states = owned_actors()
    reload_each([s for s in states if not changed.isdisjoint(base.__module__ for base in s.cls.__mro__)], report)


def owned_actors() -> list[ActorState]:
    """Returns the actor meshes spawned by this process that are not stopped."""
    states = tuple(current_runtime().meshes.values())
    return [s for s in states if isinstance(s, ActorState) and s.spawn_spec is not None and s.stopped is None]


def reload_each(states: Sequence[ActorState], report: Report) -> None:
    """Gives actor meshes the newest definitions of their classes; notes go into the report."""
    reloads: list[tuple[str, Future[None]]] = []
    for state in states:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                reloads.append((state.name, reload_mesh(ActorMesh(state, state.region))))
            except Exception as error:
                report.notes.append(f"{state.name} keeps its old class: {text_of(error)}")
        report.notes += [text_of(warning.message) for warning in caught]
    for name, future in reloads:
        failed = future.exception()
        if failed is None:
            report.meshes += (name,)
        else:
            report.notes.append(f"{name}: {failed}")


def _refresh(paths: dict[str, list[str]], roots: tuple[str, ...], also: tuple[str, ...]) -> list[str]:
    """Reloads modules in this process, and in the processes spawned from it."""
    _enter(paths)
    reloaded = [*reload_edited(roots, also).modules]
    return reloaded + _everywhere(get_active_proc_meshes(), _refresh, paths, roots, also)


def _enter(paths: dict[str, list[str]]) -> None:
    """Puts new folders first on the path of this process."""
    sys.path[:0] = [folder for folder in paths.get(current_runtime().host, ()) if folder not in sys.path]


def _reload_owned(changed: frozenset[str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Reloads the actors spawned from this process, and from processes spawned from it."""
    report = Report()
    reload_actors(changed, report)
    return [(report.meshes, report.notes), *_everywhere(get_active_proc_meshes(), _reload_owned, changed)]


def _on_living(
    mesh: ProcMesh, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> list[Future[ValueMesh[T]]]:
    """Runs a function in the processes of a mesh that have not failed."""
    state, region = state_of(mesh), region_of(mesh)
    failed = current_runtime().part(Driver).lost_ranks(state.uid)
    if not failed:
        return [mesh.run(function, *args, **kwargs)]
    living = [rank for rank in region.ranks() if rank not in failed]
    return [ProcMesh(state, Region((), NDSlice(rank, (), ()))).run(function, *args, **kwargs) for rank in living]


# -- workspaces --------------------------------------------------------------------------------------------------------


def folders_of(workspace: object) -> list[Path]:
    """Returns the folders of a path, of several, or of an object with `dirs`.

    Raises TypeError for any other value, NotADirectoryError, and ValueError for no folder.
    """
    source: Any = getattr(workspace, "dirs", workspace)
    several = isinstance(source, Iterable) and not isinstance(source, str | os.PathLike)
    paths = [*source] if several else [source]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"sync_workspace takes a folder, several, or an object with `dirs`, not {workspace!r}")
    folders = [Path(path).expanduser().resolve() for path in paths]
    for folder in folders:
        if not folder.is_dir():
            raise NotADirectoryError(f"sync_workspace: {folder} is not a folder")
    if not folders:
        raise ValueError("sync_workspace: the workspace names no folder")
    return folders


def sync(
    name: str,
    hosts: Sequence[str],
    python: str | None,
    workspace: object,
    auto_reload: bool,
    shares_files: Callable[[str], bool],
) -> Report:
    """Copies the folders of a workspace to the hosts of a mesh; see `HostMesh.sync_workspace`. Blocks.

    `shares_files` returns whether a host has the files of this machine.
    """
    runtime = current_runtime()
    folders = folders_of(workspace)
    remote = [host for host in hosts if not shares_files(host)]
    names = [f"{folder.name}-{hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()}" for folder in folders]
    copied = _copy(name, python, remote, dict(zip(names, folders, strict=True))) if remote else {}
    by_host = {host: copied.get(host) or [str(folder) for folder in folders] for host in hosts}
    for host, paths in by_host.items():
        first_on_path = runtime.part(MeshRegistry).workspaces.setdefault(host, [])
        first_on_path[:0] = [folder for folder in paths if folder not in first_on_path]
    roots = list(dict.fromkeys(folder for paths in by_host.values() for folder in paths))
    procs = [mesh for mesh in get_active_proc_meshes() if not set(hosts).isdisjoint(state_of(mesh).hosts)]
    if auto_reload:
        return reload_code(roots, procs=procs, paths=by_host)
    for future in [future for mesh in procs for future in _on_living(mesh, _enter, by_host)]:
        future.get()
    return Report()


class File(NamedTuple):
    """The target state of a file."""

    digest: bytes
    executable: bool


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path


def _manifest(root: Path) -> dict[str, File]:
    """Returns all files below a folder by relative path, except hidden ones, byte code and virtual environments.

    Raises ValueError for more than 256 MiB.
    """
    files: dict[str, File] = {}
    size = 0
    for path in _files(root):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of an editor
            facts = path.stat()
            size += facts.st_size
            if size > MOST_BYTES:
                raise ValueError(
                    f"{root} has more than {MOST_BYTES >> 20} MiB of files: a workspace is for code; pass a folder "
                    "that holds only the code"
                )
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
            files[path.relative_to(root).as_posix()] = File(digest, bool(facts.st_mode & 0o100))
    return files


def _missing_files(job: str, name: str, manifest: Mapping[str, File]) -> list[str]:
    """Returns the files that a copy lacks or has in another version. Runs on the host."""
    folder = _folder(job, name)
    have = _manifest(folder) if folder.is_dir() else {}
    return [file for file, facts in manifest.items() if have.get(file) != facts]


def _update_copy(job: str, name: str, manifest: Mapping[str, File], contents: Mapping[str, bytes]) -> str:
    """Writes files atomically, and removes those that are not in the manifest.

    Runs on the host, and returns the path of the copy there.
    """
    root = _folder(job, name)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in _manifest(root).keys() - manifest.keys():
        (root / file).unlink(missing_ok=True)
    for file, data in contents.items():
        target = root / file
        if target.is_dir():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        draft.write_bytes(data)
        draft.chmod(0o700 if manifest[file].executable else 0o600)
        draft.replace(target)
    return str(root)


def _folder(job: str, name: str) -> Path:
    return Path(current_runtime().node.run_folder, "work", job, name)


def _copy(mesh: str, python: str | None, hosts: list[str], folders: dict[str, Path]) -> dict[str, list[str]]:
    """Copies folders to hosts that do not share the files of this machine; returns the paths there by host."""
    job = current_runtime().address.replace("/", "-")
    helpers = spawn_helpers(HostMesh(mesh, hosts, host_labels(hosts), python=python), "sync_workspace")
    try:
        copies: dict[str, list[str]] = {host: [] for host in hosts}
        for name, folder in folders.items():
            manifest = _manifest(folder)
            lacking = helpers.run(_missing_files, job, name, manifest).get().values()
            needed = {file for files in lacking for file in files}
            contents = {file: (folder / file).read_bytes() for file in needed}
            for host, path in zip(
                hosts, helpers.run(_update_copy, job, name, manifest, contents).get().values(), strict=True
            ):
                copies[host].append(path)
        return copies
    finally:
        helpers.stop("the workspace is there").get()
