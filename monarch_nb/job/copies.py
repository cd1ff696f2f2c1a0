"""Trees of files: their differences, and copies of them."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CHUNK = 8 << 20  # bytes of files in one message
_SKIPPED = frozenset({".monarch"})  # written by jobs


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
    """Lists the entries below a folder by relative path. Links are not followed, nor other file systems entered."""
    tree: Tree = {}
    device = root.stat().st_dev
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in (*folders, *sorted(names)):
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
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
