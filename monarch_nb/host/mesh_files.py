"""Files of meshes that may outlive their controllers: their hosts, and the secret for attaching them.

One file per mesh, mode 0600, in a private folder of the user. The mesh's owner writes it; after the mesh's end it
records the end until it has been read.
"""

import contextlib
import os
import platform
import re
import socket
import time
from datetime import datetime
from pathlib import Path

import msgspec

from monarch_nb._private import is_private, read_private, write_private
from monarch_nb.host.folders import base_folder
from monarch_nb.host.linux import boot_id, process_state
from monarch_nb.host.protocol import MeshHolder
from monarch_nb.wire import json_decoder

KEEPERS = 2  # hosts of a mesh that store its full record: agents may be restarted
_ENDED_S = 7 * 86400.0  # how long the end of a mesh is recorded
_LATE_S = 60.0  # after the end of a lease


class HostRoute(msgspec.Struct, frozen=True):
    """The route to one host of a mesh: its run folder on this machine, or an endpoint with the job's key."""

    host: str
    endpoint: str  # ipc://<run folder>, or tcp://...; empty for one that cannot be dialled
    key: str = ""  # as in a key file
    tunnel: str = ""  # how its job opens another tunnel: the endpoint was the end of the old one
    gateway: "HostRoute | None" = None  # the host that dials it
    calls: str = ""  # the endpoint that its agent dials, if it cannot be dialled


class MeshFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a mesh's file."""

    uid: str
    name: str
    secret: str
    ways: tuple[HostRoute, ...]
    version: str  # of monarch_nb
    python: str
    machine: str  # where its owner ran when this was written
    ranks: int
    shape: str
    actors: tuple[str, ...] = ()
    holder: MeshHolder | None = None  # None while it is detached
    former: str = ""  # the address of the last holder if that was killed
    keep: float = 0.0  # seconds that it lives on when its holder ends; 0: it ends with it
    left_at: float = 0.0  # times are of the wall clock
    until: float = 0.0  # when its lease ends, while it is detached
    until_monotonic: float = 0.0  # the same by the monotonic clock of the machine since this boot
    boot: str = ""
    why: str = ""  # why it was detached
    ended: str = ""  # the reason, once it has ended
    ended_at: float = 0.0


def folder() -> Path:
    """Returns the folder: in `$XDG_STATE_HOME` (`~/.local/state`), or beside the run folders if that is not ours."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    for base in (state / "monarch-nb", base_folder() / f"monarch-nb-{os.geteuid()}"):
        path = base / "meshes"
        with contextlib.suppress(OSError):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            if is_private(path) and os.access(path, os.W_OK):
                return path
    raise PermissionError(f"{state} cannot be written by this user: set XDG_STATE_HOME to a folder that can")


def path_of(uid: str, name: str) -> Path:
    """Returns the file of a mesh."""
    readable = re.sub(r"[^\w.-]", "_", name)[:40]
    return folder() / f"{readable}.{uid}.json"


def write(path: Path, mesh: MeshFile) -> None:
    """Writes a file, whole or not at all. Raises OSError."""
    write_private(path, msgspec.json.encode(mesh))


def read(path: Path) -> MeshFile | None:
    """Reads a file; None if it is missing, not this user's own, or invalid."""
    try:
        return json_decoder(MeshFile).decode(read_private(path))
    except (OSError, msgspec.DecodeError):
        return None


def change(path: Path, **changes: object) -> None:
    """Changes fields of a file. Never raises."""
    mesh = read(path)
    with contextlib.suppress(OSError):
        if mesh is not None:
            write(path, msgspec.structs.replace(mesh, **changes))


def leave(path: Path, seconds: float, reason: str, *, left_at: float | None = None, former: str = "") -> None:
    """Records that a mesh is detached, for the seconds that are left of its lease. Never raises."""
    now = time.time()
    more = {"former": former} if former else {}
    change(path, holder=None, left_at=now if left_at is None else left_at, until=now + seconds, boot=boot_id(),
           until_monotonic=time.monotonic() + seconds, why=reason, **more)  # fmt: skip


def lease_left(mesh: MeshFile) -> float:
    """Returns the seconds that are left of a detached mesh's lease; negative once it is over.

    The wall clock, which may be set, decides only for leases that another machine has recorded.
    """
    if mesh.boot and mesh.boot == boot_id():
        return mesh.until_monotonic - time.monotonic()
    return mesh.until - time.time()


def end(path: Path, reason: str) -> None:
    """Records a mesh's end and its reason. Never raises; does nothing to a mesh that is held."""
    mesh = read(path)
    if mesh is not None and mesh.holder is None:
        change(path, secret="", ways=(), ended=reason, ended_at=time.time())


def own_system() -> str:
    """Returns the scope of this process's process ids: this machine since its boot, and a name space."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def start_of(pid: int) -> int:
    """Returns when a process was started, in clock ticks since the boot; 0 if unknown."""
    with contextlib.suppress(OSError):
        return process_state(pid)[1]
    return 0


def has_ended(holder: MeshHolder) -> bool:
    """Returns whether a holder is known, on this machine, to have ended."""
    if not holder.system or holder.system != own_system():
        return False
    try:
        state, ticks = process_state(holder.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or (holder.started > 0 and ticks != holder.started)  # its pid was reused


def tidied() -> list[tuple[Path, MeshFile]]:
    """Returns all files, after correcting those whose holders or agents were killed."""
    for path, mesh in all_files():
        if not mesh.ended:
            _tidy(path, mesh)
    return all_files()


def _tidy(path: Path, mesh: MeshFile) -> None:
    holder = mesh.holder
    if holder is not None and has_ended(holder):
        reason = f"{holder.what} (process {holder.pid}) has ended"
        leave(path, mesh.keep, reason, former=holder.address)
        if not mesh.keep:
            end(path, f"it has ended with its program: {reason}")
            return
        holder = None
    if holder is not None:
        return
    if agent_gone(mesh):
        end(path, "its host agent was killed, or the machine was restarted")
    elif mesh.until > 0 and lease_left(mesh) < -_LATE_S:
        # Its agent, on another machine, has had the time to record the end.
        end(path, f"nobody came back to it: its lease ended at {clock(mesh.until)}")


def agent_gone(mesh: MeshFile) -> bool:
    """Returns whether no agent remains that could know of a mesh on this machine."""
    endpoints = [way.endpoint for way in mesh.ways[:KEEPERS]]
    if not endpoints or mesh.machine != platform.node() or not all(path.startswith("ipc://") for path in endpoints):
        return False
    return not any(_listens(Path(path.removeprefix("ipc://"), "agent")) for path in endpoints)


def _listens(path: Path) -> bool:
    """Returns whether a process listens at a socket. Does not block."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.setblocking(False)
        try:
            knock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # a listener may refuse to accept
            return True
    return True


def remove(path: Path) -> None:
    """Removes a file. Never raises."""
    with contextlib.suppress(OSError):
        path.unlink()


def all_files() -> list[tuple[Path, MeshFile]]:
    """Returns all files, the newest last, after removing old records of ends."""
    files = []
    for path in sorted(folder().glob("*.json"), key=_age):
        mesh = read(path)
        if mesh is None:
            continue
        if mesh.ended and time.time() - mesh.ended_at > _ENDED_S:
            remove(path)
        else:
            files.append((path, mesh))
    return files


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def clock(timestamp: float) -> str:
    """Formats a time of day."""
    return datetime.fromtimestamp(timestamp).astimezone().strftime("%H:%M:%S")
