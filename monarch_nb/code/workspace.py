"""Distribution of edited code: files to hosts that lack them, modules to processes, classes to actors."""

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from msgspec import Struct, field

from monarch_nb.code import modules
from monarch_nb.code.reload import reload_mesh
from monarch_nb.mesh import ValueMesh
from monarch_nb.mesh.active import get_active_proc_meshes
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ActorState, Future, current_runtime
from monarch_nb.shape import NDSlice, Region
from monarch_nb.supervision import Driver
from monarch_nb.wire import text_of

T = TypeVar("T")

P = ParamSpec("P")

_SKIPPED = frozenset({"__pycache__", "node_modules"})
MOST_BYTES = 256 << 20  # of one workspace, which holds code, not data


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
    reloaded = dict.fromkeys(modules.reload_edited(roots, also).modules)
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
    reloaded = [*modules.reload_edited(roots, also).modules]
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
    """Returns the folders of a path, of several, or of an object with `dirs`. Raises NotADirectoryError, ValueError."""
    source: Any = getattr(workspace, "dirs", workspace)
    paths: list[str | os.PathLike[str]] = [source] if isinstance(source, str | os.PathLike) else list(source)
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
    helpers = HostMesh(mesh, hosts, host_labels(hosts), python=python).spawn_procs(name="sync_workspace")
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
