"""Trees of files, what of one another one lacks, and copies of them."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CHUNK = 8 << 20  # bytes of files in one message
_SKIPPED = frozenset({".monarch"})  # what jobs write of themselves


class FolderEntry(NamedTuple):
    """One thing in a folder, as it is known without reading it."""

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
    """What is below a folder, by relative path; links as they are, of other file systems only the folder itself."""
    tree: Tree = {}
    device = root.stat().st_dev
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in (*folders, *sorted(names)):
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                facts = path.lstat()
                relative = path.relative_to(root).as_posix()
                if path.is_symlink():
                    tree[relative] = FolderEntry("link", target=os.readlink(path))
                elif path.is_dir():
                    tree[relative] = FolderEntry("folder")
                elif path.is_file():
                    tree[relative] = FolderEntry("file", facts.st_size, facts.st_mtime_ns, facts.st_mode & 0o777)
        folders[:] = [name for name in folders if _device(Path(folder, name)) == device]
    return tree


def _device(folder: Path) -> int | None:
    """That of a folder; None for a link to one, and for one that went."""
    with contextlib.suppress(FileNotFoundError):
        return None if folder.is_symlink() else folder.stat().st_dev
    return None


def changed(target: Tree, have: Tree) -> list[str]:
    """The files of a tree whose bytes another one lacks."""
    return [name for name, entry in target.items() if entry.kind == "file" and have.get(name) != entry]


def read_pieces(root: Path, names: Iterable[str]) -> Iterator[list[FilePiece]]:
    """The bytes of some files, so many at a time; a file that went has none."""
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
    """A copy of a tree. A file is written aside, and put in its place whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mark = f".mnb-{secrets.token_hex(3)}"

    def write(self, pieces: Sequence[FilePiece]) -> None:
        """Takes bytes of files, in order."""
        for piece in pieces:
            draft = self._draft(piece.name)
            with open(draft, "wb" if piece.offset == 0 else "r+b") as file:
                file.seek(piece.offset)
                file.write(piece.data)

    def settle(self, target: Tree, fresh: Iterable[str]) -> None:
        """Makes it be what is wanted, of which the bytes of the `fresh` files have come."""
        have = tree_of(self.root) if self.root.is_dir() else {}
        drafts = {self._draft(name).relative_to(self.root).as_posix() for name in fresh}
        for name in sorted(have.keys() - target.keys() - drafts, reverse=True):  # what is in a folder before it
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
        # Not in its own folder, which may be a file yet.
        digest = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
        return self.root / f"{self._mark}-{digest}"


def remove(path: Path) -> None:
    """A file, a link or a folder with all in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
