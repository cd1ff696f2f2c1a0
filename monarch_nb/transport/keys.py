"""Keys: one CurveZMQ key pair per job, in a file that only its user can read.

Both ends of a connection use the same pair, and a listener accepts no other. Inside a host the run folder's permissions
do the same.
"""

import contextlib
import errno
import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from monarch_nb._deferred import zmq
from monarch_nb._package import more
from monarch_nb._private import no_link
from monarch_nb.transport.errors import TrustError, descriptors_for

KeyStep = Literal["expect", "use", "done", "cancel"]  # of a change from one pair to another

_TITLE = "monarch-nb key 1"
_HOW = (
    "Make one with `Keys.load_or_create(path)` (monarch_nb.transport), give every host the same file with mode 0600, "
    "and pass it on both sides." + more("manual/hosts.md#who-is-trusted")
)


@dataclass(frozen=True, slots=True)
class Keys:
    """One job's key pair (Z85 text)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> "Keys":
        """Returns a new pair, stored nowhere."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Keys":
        """Reads a key file. Raises TrustError if others could have read it, FileNotFoundError without a file."""
        file_path = Path(path)
        try:
            with descriptors_for(f"the key file {file_path}"), open(file_path, "rb", opener=no_link) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait
                    raise TrustError(f"the key file {file_path} is not a file")
                if status.st_uid != os.geteuid():
                    raise TrustError(f"the key file {file_path} belongs to another user (uid {status.st_uid})")
                if status.st_mode & 0o077:
                    mode = stat.S_IMODE(status.st_mode)
                    raise TrustError(f"the key file {file_path} can be read by others (mode {mode:o}): chmod 600 it")
                return cls.from_text(file.read(4096), str(file_path))
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = "it is a link: name the file itself" if error.errno == errno.ELOOP else error.strerror
            raise TrustError(f"the key file {file_path} cannot be read: {reason}") from error

    @classmethod
    def from_text(cls, text: bytes, source: str = "the given text") -> "Keys":
        """Returns the pair of a key file's content. Raises TrustError for other content."""
        lines = text.split(b"\n")
        try:
            title, public, secret = lines[0], lines[1].strip(), lines[2].strip()
            if title.strip() != _TITLE.encode() or zmq.curve_public(secret) != public:
                raise ValueError("not a key pair")
        except (IndexError, ValueError, zmq.ZMQError) as error:
            raise TrustError(f"{source} is not a monarch-nb key file: remove it and have it made again") from error
        return cls(public, secret)

    def to_text(self) -> bytes:
        """Returns the content of a key file, for a launcher's own secret channel."""
        return b"\n".join([_TITLE.encode(), self.public, self.secret, b""])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the pair to `path` (mode 0600), replacing any file there, whole or not at all. Raises OSError."""
        draft = self._draft(Path(path))
        try:
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)
            raise

    def check_file(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError if `save` could not write the pair beside `path`; leaves nothing there."""
        os.unlink(self._draft(Path(path)))

    def _draft(self, path: Path) -> Path:
        """Creates a file beside `path`, with the pair."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(self.to_text())
                file.flush()
                os.fsync(fd)
        except OSError:
            os.unlink(draft)
            raise
        return draft

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> "Keys":
        """Returns the pair in `path`; without such a file, creates a new pair and stores it there (mode 0600).

        Processes may do this at the same time: all get the same pair. Raises TrustError.
        """
        file_path = Path(path)
        with contextlib.suppress(FileNotFoundError):
            return cls.load(file_path)
        try:
            file_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = cls.create()._draft(file_path)
            try:
                with contextlib.suppress(FileExistsError):  # another process was first, and its pair counts
                    os.link(draft, file_path)
            finally:
                os.unlink(draft)
        except OSError as error:
            raise TrustError(f"no key file can be made at {file_path}: {error.strerror}") from error
        return cls.load(file_path)


def require_keys(endpoint: str, keys: Keys | None, insecure_loopback: bool) -> None:
    """Raises TrustError unless this TCP endpoint may be used with these keys.

    Without keys only addresses of this machine itself (127.0.0.0/8, ::1) may be used, with `insecure_loopback`.
    """
    if keys is not None or not endpoint.startswith("tcp://"):
        return
    if insecure_loopback and _is_loopback(endpoint):
        return
    detail = " (without one, only 127.0.0.1 and ::1 are allowed)" if insecure_loopback else ""
    raise TrustError(f"{endpoint} needs a key{detail}. {_HOW}")


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, whose address is unknown
        return False
