"""Files of meshes that may outlive their controllers: where they run, and the secret that is asked for there.

One file a mesh, mode 0600, in a folder that is this user's own. It is written by the mesh's owner, and says at the end
what became of the mesh, until somebody has read that.
"""

import contextlib
import os
import platform
import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._private import is_private, read_private, write_private
from monarch_nb.host.folders import base_folder
from monarch_nb.host.holdings import clock
from monarch_nb.host.linux import boot_id, process_state, seconds_since
from monarch_nb.host.protocol import Holder
from monarch_nb.wire import json_decoder

KEEPERS = 2  # hosts of a mesh that keep all there is to know of it: agents may be started anew
_TOLD_S = 7 * 86400.0  # how long the end of a mesh is kept for who comes late
_LATE_S = 60.0  # after the end of a lease
_CLOCK_S = 2.0  # by which the times of two clocks of one machine may differ


class Way(msgspec.Struct, frozen=True):
    """How one host of a mesh is reached: by its run folder on this machine, or at an endpoint with the job's key."""

    host: str
    endpoint: str  # ipc://<run folder>, or tcp://...; empty for one that nobody can dial
    key: str = ""  # as a key file has it
    tunnel: str = ""  # what opens one to it anew, as its job has written it: the endpoint was the end of the old one
    gateway: "Way | None" = None  # the host that dials it
    calls: str = ""  # the endpoint that its agent dials, where nobody can dial it


class MeshFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down of one mesh."""

    uid: str
    name: str
    secret: str
    ways: tuple[Way, ...]
    version: str  # of monarch_nb
    python: str
    machine: str  # where its owner ran when this was written
    ranks: int
    shape: str
    actors: tuple[str, ...] = ()
    holder: Holder | None = None  # None while nobody has it
    former: str = ""  # the address of the last holder, which has ended without a word
    keep: float = 0.0  # seconds that it lives on when its holder ends; 0: it ends with it
    left_at: float = 0.0  # times are of the wall clock
    until: float = 0.0  # when its lease ends, while nobody has it
    why: str = ""  # it was left
    ended: str = ""  # why, once it has
    ended_at: float = 0.0


def folder() -> Path:
    """Where they are: in `$XDG_STATE_HOME` (`~/.local/state`), or beside the run folders where that is not ours."""
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
    """The file of a mesh."""
    readable = re.sub(r"[^\w.-]", "_", name)[:40]
    return folder() / f"{readable}.{uid}.json"


def write(path: Path, mesh: MeshFile) -> None:
    """Writes it, whole or not at all. Raises OSError."""
    write_private(path, msgspec.json.encode(mesh))


def read(path: Path) -> MeshFile | None:
    """What it says; None where it is not there, not this user's own, or nonsense."""
    try:
        return json_decoder(MeshFile).decode(read_private(path))
    except (OSError, msgspec.DecodeError):
        return None


def change(path: Path, **changes: Any) -> None:
    """Some of what it says is different now. Never raises."""
    mesh = read(path)
    with contextlib.suppress(OSError):
        if mesh is not None:
            write(path, msgspec.structs.replace(mesh, **changes))


def end(path: Path, why: str) -> None:
    """The mesh is gone, and why: for who asks for it later. Never raises; one that somebody holds is left alone."""
    mesh = read(path)
    if mesh is not None and mesh.holder is None:
        change(path, secret="", ways=(), ended=why, ended_at=time.time())


def own_system() -> str:
    """Where the ids of this process's processes mean something: this machine since its start, and a name space."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def has_ended(holder: Holder) -> bool:
    """Whether a holder is seen to have ended, from this machine."""
    if not holder.system or holder.system != own_system():
        return False
    try:
        state, ticks = process_state(holder.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or time.time() - seconds_since(ticks) > holder.since + _CLOCK_S  # its pid was given again


def tidied() -> list[tuple[Path, MeshFile]]:
    """All files, those that nobody has written into since their holders or agents were killed put right."""
    for path, mesh in all_files():
        if not mesh.ended:
            _tidy(path, mesh)
    return all_files()


def _tidy(path: Path, mesh: MeshFile) -> None:
    now, holder = time.time(), mesh.holder
    if holder is not None and has_ended(holder):
        who = f"{holder.what} (process {holder.pid}) has ended"
        change(path, holder=None, former=holder.address, left_at=now, until=now + mesh.keep, why=who)
        if not mesh.keep:
            end(path, f"it has ended with its program: {who}")
            return
        holder = None
    if holder is not None:
        return
    if agent_gone(mesh):
        end(path, "its host agent was killed, or the machine was restarted")
    elif 0 < mesh.until < now - _LATE_S:  # its agent, on another machine, has had the time to see to that
        end(path, f"nobody came back to it: its lease ended at {clock(mesh.until)}")


def agent_gone(mesh: MeshFile) -> bool:
    """Whether nobody is there any more who could know of a mesh on this machine."""
    keepers = [way.endpoint for way in mesh.ways[:KEEPERS]]
    if not keepers or mesh.machine != platform.node() or not all(each.startswith("ipc://") for each in keepers):
        return False
    return not any(_listens(Path(each.removeprefix("ipc://"), "agent")) for each in keepers)


def _listens(path: Path) -> bool:
    """Whether somebody is at a socket. Does not block."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.setblocking(False)
        try:
            knock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # somebody may be there and let nobody in
            return True
    return True


def remove(path: Path) -> None:
    """Nobody needs it any more. Never raises."""
    with contextlib.suppress(OSError):
        path.unlink()


def all_files() -> list[tuple[Path, MeshFile]]:
    """All that there are, the newest last. Old tellings of ends are removed."""
    found = []
    for path in sorted(folder().glob("*.json"), key=_age):
        mesh = read(path)
        if mesh is None:
            continue
        if mesh.ended and time.time() - mesh.ended_at > _TOLD_S:
            remove(path)
        else:
            found.append((path, mesh))
    return found


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
