"""The log file of a proc: all it wrote, as plain text, in a few files of limited size."""

import contextlib
import os
import re
from pathlib import Path

from monarch_nb.settings import settings
from monarch_nb.wire import parse_address


class LogFile:
    """Appends to `path`; once that is large enough it becomes `path.1`, that one `path.2`, and the oldest goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""  # why the last attempt to write has failed
        self._fd = -1
        self._size = 0
        self._most = settings.log_file_size
        self._count = settings.log_file_count

    def write(self, data: bytes) -> bool:
        """Append some output; whether that worked. Where an attempt before has failed, the file says so."""
        try:
            if self._fd < 0:
                self._open()
            if self._size and self._size + len(data) > self._most:
                self._rotate()
            if self.error:
                self._write_all(f"[output is missing here: {self.error}]\n".encode())
                self.error = ""
            self._write_all(data)
        except OSError as error:
            self.error = error.strerror or str(error)
        return not self.error

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        for number in range(self._count - 1, 0, -1):
            older = self.path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, self._numbered(number))
        if self._count == 1:
            os.truncate(self.path, 0)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def path_for(address: str, mesh: str, folder: Path) -> Path:
    """Where the log of a proc goes, named after its mesh: in `folder`, or in what the setting log_folder says."""
    name = re.sub(r"[^\w.-]", "_", mesh)[:40]
    place = parse_address(address).name
    configured = settings.log_folder
    return (Path(configured).expanduser() if configured else folder) / f"{f'{name}.' if name else ''}{place}.log"
