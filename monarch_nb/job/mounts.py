"""Folders of this machine on hosts, and the reverse: `monarch.remotemount`, `monarch.gather_mount`.

They are copies, sent when they change: no file system in user space is mounted, which most containers do not allow.
"""

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monarch_nb.mesh import HostMesh, ProcMesh, spawn_helpers
from monarch_nb.runtime import Actor, current_runtime, endpoint
from monarch_nb.shape import Point
from monarch_nb.supervision import SupervisionError

__all__ = ["GatherMount", "MountHandler", "gather_mount", "remotemount"]
logger = logging.getLogger("monarch_nb.mounts")
CHUNK = 8 << 20  # bytes of files in one message
_SKIPPED = frozenset({".monarch"})  # written by jobs
_COPY = re.compile(r"\..+\.mnb-[0-9a-f]+")  # the folder behind a mount point
_REFRESH_S = 2.0
_ANSWER_S = 300.0
_warned: set[str] = set()


class FolderEntry(NamedTuple):
    """An entry of a folder, described without reading its content."""

    kind: str  # "file", "link" or "folder"
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0
    target: str = ""  # of a link


class FilePiece(NamedTuple):
    """Some bytes of a file."""

    name: str
    offset: int
    data: bytes


Tree = dict[str, FolderEntry]


def tree_of(root: Path) -> Tree:
    """Lists the entries below a folder by relative path. Links are not followed, nor other file systems entered.

    Copies of mounts are left out: a mount point may lie in the folder itself.
    """
    tree: Tree = {}
    device = root.stat().st_dev
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not _COPY.fullmatch(name))
        for name in (*folders, *sorted(names)):
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                facts = path.lstat()
                relative = path.relative_to(root).as_posix()
                if path.is_symlink():
                    if not _COPY.fullmatch(target := os.readlink(path)):
                        tree[relative] = FolderEntry("link", target=target)
                elif path.is_dir():
                    tree[relative] = FolderEntry("folder")
                elif path.is_file():
                    tree[relative] = FolderEntry("file", facts.st_size, facts.st_mtime_ns, facts.st_mode & 0o777)
        folders[:] = [name for name in folders if _device(Path(folder, name)) == device]
    return tree


def _device(folder: Path) -> int | None:
    """Returns the device of a folder; None for a link, and for a folder that no longer exists."""
    with contextlib.suppress(FileNotFoundError):
        return None if folder.is_symlink() else folder.stat().st_dev
    return None


def changed(target: Tree, have: Tree) -> list[str]:
    """Returns the files of `target` whose bytes `have` lacks."""
    return [name for name, entry in target.items() if entry.kind == "file" and have.get(name) != entry]


def read_pieces(root: Path, names: Iterable[str]) -> Iterator[list[FilePiece]]:
    """Yields the bytes of some files, at most `CHUNK` at a time; nothing for files that no longer exist."""
    batch: list[FilePiece] = []
    filled = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError), open(root / name, "rb") as file:
            offset = 0
            while (data := file.read(CHUNK - filled)) or offset == 0:
                batch.append(FilePiece(name, offset, data))
                offset += len(data)
                filled += len(data)
                if filled >= CHUNK:
                    yield batch
                    batch, filled = [], 0
                if not data:
                    break
    if batch:
        yield batch


class Copy:
    """A copy of a tree. Each file is written under another name, and renamed when it is complete."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mark = f".mnb-{secrets.token_hex(3)}"

    def write(self, pieces: Sequence[FilePiece]) -> None:
        """Writes pieces of files, which come in order."""
        for piece in pieces:
            draft = self._draft(piece.name)
            with open(draft, "wb" if piece.offset == 0 else "r+b") as file:
                file.seek(piece.offset)
                file.write(piece.data)

    def settle(self, target: Tree, fresh: Iterable[str]) -> None:
        """Makes the copy equal to `target`; the bytes of the `fresh` files have been written."""
        have = tree_of(self.root) if self.root.is_dir() else {}
        drafts = {self._draft(name).relative_to(self.root).as_posix() for name in fresh}
        for name in sorted(have.keys() - target.keys() - drafts, reverse=True):  # a folder after its entries
            remove(self.root / name)
        for name, entry in target.items():
            path = self.root / name
            if name in have and have[name].kind != entry.kind:
                remove(path)
            if entry.kind == "folder":
                path.mkdir(parents=True, exist_ok=True)
            elif entry.kind == "link" and have.get(name) != entry:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.symlink_to(entry.target)
        for name in fresh:
            draft, entry = self._draft(name), target[name]
            if draft.exists():
                draft.chmod(entry.mode)
                os.utime(draft, ns=(entry.mtime_ns, entry.mtime_ns))
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                draft.replace(self.root / name)

    def _draft(self, name: str) -> Path:
        # Not in the folder of the file, which may still be a file itself.
        digest = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
        return self.root / f"{self._mark}-{digest}"


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its content, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class WantedMount(NamedTuple):
    """A requested mount: a folder for the meshes of a job, or a folder of theirs that is gathered here."""

    source: str
    point: str
    meshes: tuple[str, ...] | None = None  # None: all
    python: str = ""  # of the processes of these meshes; "" for the default
    gathers: bool = False

    @classmethod
    def to_hosts(
        cls, source: str, point: str | None, meshes: Sequence[str] | None, python: str | None
    ) -> "WantedMount":
        """Requests a folder of this machine. Raises ValueError for a Python outside of it, or that differs on hosts."""
        source = os.path.abspath(source)
        point = source if point is None else os.path.abspath(point)
        if python is not None:
            if not os.path.isfile(os.path.join(source, python)):
                raise ValueError(
                    f"python_exe={python!r} is not in {source}: make that environment first, or give python_exe=None "
                    "for the Python that the hosts have"
                )
            if "$SUBDIR" in point:
                raise ValueError(f"python_exe={python!r} must be at the same path on each host, without $SUBDIR")
        return cls(source, point, _names(meshes), os.path.join(point, python) if python else "")

    @classmethod
    def to_here(cls, source: str, point: str, meshes: Sequence[str] | None) -> "WantedMount":
        """Requests a folder of the hosts."""
        return cls(source, os.path.abspath(point), _names(meshes), gathers=True)

    @classmethod
    def saved(cls, fields: Sequence[Any]) -> "WantedMount":
        """Restores a mount from its JSON list."""
        source, point, meshes, python, gathers = fields
        return cls(source, point, _names(meshes), python, gathers)

    def meshes_of(self, meshes: Iterable[str]) -> list[str]:
        """Returns the meshes of the mount. Raises ValueError for a mesh that the job does not have."""
        names = list(meshes)
        if missing := [name for name in self.meshes or () if name not in names]:
            raise ValueError(f"{self}: the job has no mesh {missing[0]!r}, but {', '.join(map(repr, names))}")
        return [name for name in names if self.meshes is None or name in self.meshes]

    def folder_of(self, mesh: str, meshes: Iterable[str]) -> str:
        """Returns the target folder for a mesh: each of several gathered meshes has its own."""
        return os.path.join(self.point, mesh) if self.gathers and len(self.meshes_of(meshes)) > 1 else self.point

    def __str__(self) -> str:
        return f"gather_mount of {self.source}" if self.gathers else f"remote_mount of {self.source}"


def _names(meshes: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if meshes is None else (meshes,) if isinstance(meshes, str) else tuple(meshes)


def place_of(point: Point) -> str:
    """Formats a place of a mesh as the name of a folder: `hosts_0`, "" where there is only one place."""
    return "_".join(f"{label}_{index}" for label, index in point.items())


def _own_place() -> str:
    return place_of(current_runtime().context().message_rank)


class RemoteMountActor(Actor):
    """A copy of the client's folder on one host: a link at the mount point leads to a folder beside it."""

    def __init__(self, mount_point: str, mark: str) -> None:
        self._point = Path(os.path.abspath(mount_point.replace("$SUBDIR", _own_place())))
        self._root = self._point.parent / f".{self._point.name}.mnb-{mark}"
        self._copy: Copy | None = None

    @endpoint
    def open(self) -> None:
        """Creates the folder. Raises FileExistsError if the mount point is in use, also by another host of the mesh."""
        self._point.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._root.mkdir(mode=0o700)  # by the first of hosts that share a file system
        except FileExistsError:
            raise FileExistsError(
                f"{self._point} is the same folder on several hosts: put $SUBDIR into the mount point, which stands "
                f"for the place of a host, as in {self._point}-$SUBDIR"
            ) from None
        try:
            self._link()
        except BaseException:
            self._root.rmdir()
            raise
        self._copy = Copy(self._root)

    def _link(self) -> None:
        if self._point.is_symlink():
            target = self._point.parent / os.readlink(self._point)
            if not re.fullmatch(rf"{re.escape(f'.{self._point.name}.mnb-')}[0-9a-f]+", target.name):
                raise FileExistsError(f"{self._point} is a link to {target}: choose another mount point")
            shutil.rmtree(target, ignore_errors=True)  # of a program that was killed, or of an earlier mount
            self._point.unlink()
        elif self._point.is_dir():
            if any(self._point.iterdir()):
                raise FileExistsError(f"{self._point} is a folder with files in it: choose another mount point")
            self._point.rmdir()
        elif self._point.exists():
            raise FileExistsError(f"{self._point} is a file: choose another mount point")
        self._point.symlink_to(self._root.name)

    @endpoint
    def have(self) -> Tree:
        """Returns the tree of the copy."""
        return tree_of(self._open.root)

    @endpoint
    def write(self, pieces: list[FilePiece]) -> None:
        """Writes pieces of files to the copy."""
        self._open.write(pieces)

    @endpoint
    def settle(self, target: Tree, fresh: list[str]) -> None:
        """Completes the copy, once all pieces have been written."""
        self._open.settle(target, fresh)

    @endpoint
    def close(self) -> None:
        """Removes the copy."""
        self._end()

    @property
    def _open(self) -> Copy:
        if self._copy is None:
            raise RuntimeError(f"{self._point} is not mounted")
        if not self._is_linked():
            raise RuntimeError(f"{self._point} is another mount by now, or was removed: mount the folder again")
        return self._copy

    def _is_linked(self) -> bool:
        return self._point.is_symlink() and os.readlink(self._point) == self._root.name

    def _end(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            if self._is_linked():
                self._point.unlink(missing_ok=True)
            shutil.rmtree(copy.root, ignore_errors=True)

    def __cleanup__(self, exc: Exception | None) -> None:
        self._end()


class MountHandler:
    """The result of `remotemount`: `open()` copies the folder to the hosts, `refresh()` its changes since."""

    def __init__(self, host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> None:
        self.sourcepath = os.path.abspath(sourcepath)
        self.mntpoint = mntpoint if mntpoint is not None else self.sourcepath
        self._hosts = host_mesh
        self._procs: ProcMesh | None = None
        self._copies: Any = None
        self._refreshing = threading.Lock()

    def open(self, via_gateway: bool = False) -> None:
        """Makes the mount point on each host and fills it; blocks. Does nothing if it is open.

        Raises NotADirectoryError for a source that is no folder, and ActorError that names the obstacle on a host.
        """
        if self._procs is not None:
            return
        if not os.path.isdir(self.sourcepath):
            raise NotADirectoryError(f"{self.sourcepath} is not a folder of this machine")
        say_once(logger, "remotemount: the folder is copied to the hosts; call refresh() once it has changed")
        self._procs = spawn_helpers(self._hosts, "mounts")
        try:
            self._copies = self._procs.spawn("remotemount", RemoteMountActor, self.mntpoint, secrets.token_hex(4))
            self._copies.open.call().get(_ANSWER_S)
            self.refresh()
        except BaseException:
            self.close()
            raise

    def refresh(self, sourcepath: str | None = None) -> None:
        """Sends changes to the hosts that lack them, and removes there what no longer exists here; blocks.

        Raises RuntimeError if it is not open.
        """
        if self._copies is None:
            raise RuntimeError(f"{self.mntpoint} is not mounted: open() comes first")
        source, copies = Path(self.sourcepath), self._copies
        with self._refreshing:
            tree = tree_of(source)
            lacking = set[str]().union(*(changed(tree, have) for _, have in copies.have.call().get(_ANSWER_S)))
            fresh = [name for name in tree if name in lacking]
            for pieces in read_pieces(source, fresh):  # the same to all: a body is sent once to each host
                copies.write.call(pieces).get(_ANSWER_S)
            copies.settle.call(tree, fresh).get(_ANSWER_S)

    def close(self) -> None:
        """Removes the copies from the hosts; blocks. Does nothing if it is not open."""
        procs, self._procs, self._copies = self._procs, None, None
        if procs is not None:
            procs.stop("its folder was unmounted").get(_ANSWER_S)

    def __enter__(self) -> "MountHandler":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remotemount(host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> MountHandler:
    """Returns a mount of this machine's folder at `mntpoint` of each host, by default at the same path.

    `open()` copies it. $SUBDIR in `mntpoint` stands for the place of a host, for hosts that share a file system.
    """
    return MountHandler(host_mesh, sourcepath, mntpoint)


class GatherSourceActor(Actor):
    """Reads the folder of one host."""

    def __init__(self, folder: str) -> None:
        self._root = Path(folder.replace("$SUBDIR", _own_place()))

    @endpoint
    def tree(self) -> Tree:
        """Returns the tree of the folder; empty if it does not exist yet."""
        return tree_of(self._root) if self._root.is_dir() else {}

    @endpoint
    def read(self, name: str, offset: int) -> bytes:
        """Returns bytes of a file from an offset on, at most one chunk; none if it no longer exists."""
        with contextlib.suppress(FileNotFoundError), open(self._root / name, "rb") as file:
            file.seek(offset)
            return file.read(CHUNK)
        return b""


class GatherMount:
    """The result of `gather_mount`: the folders of hosts, copied here again whenever they have changed."""

    def __init__(
        self, host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str, *, interval: float | None
    ) -> None:
        self.local_mount_point = os.path.abspath(local_mount_point)
        self._root = Path(self.local_mount_point)
        self._root.mkdir(parents=True, exist_ok=True)
        if any(self._root.iterdir()):
            raise FileExistsError(f"{self._root} has files in it: choose another folder to gather in")
        self._procs: ProcMesh | None = spawn_helpers(host_mesh, "gathered")
        self._sources: Any = self._procs.spawn("gather_mount", GatherSourceActor, remote_mount_point)
        self._copies: dict[int, Copy] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise
        if interval is not None:
            threading.Thread(target=self._follow, args=(interval,), name="monarch-gather", daemon=True).start()

    def refresh(self) -> None:
        """Copies changes from the hosts; blocks. Raises RuntimeError once it is closed."""
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError(f"{self.local_mount_point} is not mounted any more")
            for point, tree in self._sources.tree.call().get(_ANSWER_S):
                self._take(point, tree)

    def close(self, deadline: float | None = None) -> None:
        """Ends the mount and removes the copies from the local folder; blocks. `deadline` has no effect."""
        self._closed.set()
        with self._lock:
            procs, self._procs = self._procs, None
            if procs is None:
                return
            procs.stop("its folders were unmounted").get(_ANSWER_S)
            for copy in self._copies.values():
                for path in tuple(self._root.iterdir()) if copy.root == self._root else (copy.root,):
                    remove(path)

    def __enter__(self) -> "GatherMount":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, point: Point, tree: Tree) -> None:
        copy = self._copies.setdefault(point.rank, Copy(self._root / place_of(point)))
        copy.root.mkdir(parents=True, exist_ok=True)
        source = self._sources.slice(**dict(point))
        fresh = changed(tree, tree_of(copy.root))
        for name in fresh:
            size, offset = tree[name].size, 0
            while offset < size or offset == 0:
                data = source.read.call_one(name, offset).get(_ANSWER_S) if size else b""
                copy.write([FilePiece(name, offset, data)])
                offset += len(data)
                if not data:
                    break
        copy.settle(tree, fresh)

    def _follow(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.refresh()
            except SupervisionError:
                return  # the hosts are lost, which is reported elsewhere
            except (RuntimeError, OSError, TimeoutError) as error:
                if not self._closed.is_set():
                    logger.info("%s: %s", self.local_mount_point, error)


def gather_mount(
    host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str, *, interval: float | None = _REFRESH_S
) -> GatherMount:
    """Copies the folder `remote_mount_point` of each host below `local_mount_point`, named after its place (`hosts_0`).

    The folder of one host without dimensions is `local_mount_point` itself. $SUBDIR in `remote_mount_point` stands for
    the place of a host. Changes are copied each `interval` seconds, and by `refresh()`; None: only by that. Blocks.
    """
    say_once(logger, "gather_mount: the folders are copied from the hosts; refresh() copies what has changed")
    return GatherMount(host_mesh, remote_mount_point, local_mount_point, interval=interval)


class JobMounts:
    """The open mounts of a job."""

    def __init__(self) -> None:
        self._open: dict[tuple[WantedMount, str], MountHandler | GatherMount] = {}

    def __reduce__(self) -> tuple[type["JobMounts"], tuple[()]]:
        return JobMounts, ()  # a copy of the job opens its own

    def follow(self, mounts: Iterable[WantedMount], meshes: Mapping[str, HostMesh]) -> None:
        """Opens new mounts, closes those no longer requested, and copies changes of the others; blocks.

        Reopens mounts whose hosts were lost. Raises RuntimeError, which names folder and mesh.
        """
        folders = {(mount, mesh): mount.folder_of(mesh, meshes) for mount in mounts for mesh in mount.meshes_of(meshes)}
        for key in self._open.keys() - folders.keys():
            self._close(key)
        for key, folder in folders.items():
            mount, mesh = key
            try:
                self._refresh(key, folder, meshes[mesh])
            except Exception as error:
                raise RuntimeError(f"{mount} on {mesh!r} failed: {error}") from error

    def close(self) -> None:
        """Closes all mounts; blocks. Lost hosts are skipped."""
        for key in tuple(self._open):
            self._close(key)

    def _refresh(self, key: tuple[WantedMount, str], folder: str, hosts: HostMesh) -> None:
        mount, mesh = key
        if key in self._open:
            try:
                self._open[key].refresh()
            except Exception as error:
                logger.info("%s on %r is opened again: %s", mount, mesh, error)
                self._close(key)
            else:
                return
        if mount.gathers:
            self._open[key] = gather_mount(hosts, mount.source, folder)
        else:
            handler = remotemount(hosts, mount.source, folder)
            handler.open()
            self._open[key] = handler

    def _close(self, key: tuple[WantedMount, str]) -> None:
        try:
            self._open.pop(key).close()
        except Exception as error:
            logger.info("%s on %r did not close properly: %s", *key, error)


def say_once(log: logging.Logger, text: str) -> None:
    """Warns of a difference to torchmonarch, once in a process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
