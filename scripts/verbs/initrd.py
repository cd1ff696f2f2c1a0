"""Writes the first file system of the guest of `make test-verbs`: busybox, the modules it loads, and a program."""

import gzip
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

MODULES = ("virtio_pci", "virtio_net", "virtio_rng", "9pnet_virtio", "9p", "overlay", "crc32_generic")
VERBS = ("rdma_rxe", "ib_uverbs", "rdma_ucm")


def order(modules: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of modules and of those that they need, in the order in which they are to be loaded."""
    index = modules / "modules.dep"
    if not index.exists():  # an unpacked package that was not installed
        subprocess.run(["busybox", "depmod", "-b", str(modules.parents[2]), modules.name], check=True)
    needs = dict(line.split(":", 1) for line in index.read_text().splitlines())
    paths = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    builtin = {Path(path).stem.replace("-", "_") for path in (modules / "modules.builtin").read_text().split()}
    result: list[str] = []

    def take(path: str) -> None:
        for need in needs[path].split():
            take(need)
        if path not in result:
            result.append(path)

    for name in names:
        if name in paths:
            take(paths[name])
        elif name not in builtin:
            raise SystemExit(f"Linux {modules.name} has no module {name}")
    return [modules / path for path in result]


def plain(path: Path) -> bytes:
    """A module as insmod takes it."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", str(path)], check=True, capture_output=True).stdout
    return data


class Archive:
    """A cpio archive of the "newc" form (cpio(5)), which kernels unpack."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._number = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        """A file, or with mode 0o040755 a folder."""
        self._number += 1
        encoded = name.encode() + b"\0"
        fields = (self._number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]

    def bytes(self) -> bytes:
        """All of it."""
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def main(target: str, modules: str, guest: str) -> None:
    """Writes `target`; `guest` is what runs once the host's files are there."""
    archive = Archive()
    for folder in ("bin", "proc", "sys", "dev", "host", "over", "root", "modules"):
        archive.add(folder, 0o040755)
    busybox = shutil.which("busybox")
    assert busybox is not None
    archive.add("bin/busybox", 0o100755, Path(busybox).read_bytes())
    files = order(Path(modules), MODULES + VERBS)
    for number, path in enumerate(files):
        archive.add(f"modules/{number:02}-{path.name.split('.')[0]}.ko", 0o100644, plain(path))
    archive.add("init", 0o100755, Path(__file__).with_name("init").read_bytes())
    archive.add("guest", 0o100755, guest.encode())
    Path(target).write_bytes(gzip.compress(archive.bytes(), 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
