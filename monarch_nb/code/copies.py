"""Folders brought to hosts that do not share this machine's files: only what differs is sent."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_SKIPPED = frozenset({"__pycache__", "node_modules"})
MOST_BYTES = 256 << 20  # of one workspace: it is code, data belongs elsewhere


class File(NamedTuple):
    """One file as it should be."""

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


def manifest(root: Path) -> dict[str, File]:
    """All files below a folder by relative path, but hidden ones, byte code and virtual environments.

    Raises ValueError for more than 256 MiB.
    """
    files: dict[str, File] = {}
    size = 0
    for path in _files(root):
        with contextlib.suppress(FileNotFoundError):  # an editor's own, gone again
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


def missing(folder: str, wanted: Mapping[str, File]) -> list[str]:
    """The files that a copy lacks, or has otherwise."""
    have = manifest(Path(folder)) if os.path.isdir(folder) else {}
    return [name for name, file in wanted.items() if have.get(name) != file]


def update(folder: str, wanted: Mapping[str, File], contents: Mapping[str, bytes]) -> None:
    """Writes the files whose contents are given, each at one stroke, and removes those that are not wanted any more."""
    root = Path(folder)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in manifest(root).keys() - wanted.keys():
        (root / name).unlink(missing_ok=True)
    for name, data in contents.items():
        target = root / name
        if target.is_dir():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        fresh.write_bytes(data)
        fresh.chmod(0o700 if wanted[name].executable else 0o600)
        fresh.replace(target)
