"""Findings of host agents about meshes without a controller, in a file for each mesh and host.

It is beside the mesh's file, on the machine of the agent, and stays for a week after its last change: it can be read
after the mesh, its agent and its own file are gone.
"""

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from monarch_nb._private import read_private, write_private
from monarch_nb.host import mesh_files
from monarch_nb.host.protocol import RunFinding
from monarch_nb.wire import json_decoder

MOST = 100  # findings of one mesh on one host
LONGEST = 2000  # characters of one
_STORED_S = 7 * 86400.0


class RunFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file: the mesh that one agent has inspected, and its findings."""

    uid: str
    name: str
    host: str
    actors: tuple[str, ...]
    since: float  # times are of the wall clock
    inspected: str = ""
    findings: tuple[RunFinding, ...] = ()


def added(findings: Sequence[RunFinding], new: Iterable[RunFinding]) -> tuple[RunFinding, ...]:
    """Returns the findings with new ones, in the order of time; a known one is extended. Pure."""
    by_key = {(finding.kind, finding.ranks, finding.source): finding for finding in findings}
    for finding in new:
        key = (finding.kind, finding.ranks, finding.source)
        former = by_key.pop(key, finding)
        times = former.times + (former is not finding)
        text = finding.text if len(finding.text) <= LONGEST else f"{finding.text[: LONGEST - 1]}…"
        by_key[key] = msgspec.structs.replace(finding, text=text, first=former.first, times=times)
    return tuple(by_key.values())[-MOST:]


def of_all_hosts(findings: Iterable[RunFinding]) -> list[RunFinding]:
    """Merges the findings of several hosts: of equal ones the longest, which names more ranks, is returned. Pure."""
    by_key: dict[tuple[str, tuple[int, ...], str], RunFinding] = {}
    for finding in findings:
        key = (finding.kind, finding.ranks, finding.source)
        if key not in by_key or len(finding.text) > len(by_key[key].text):
            by_key[key] = finding
    return sorted(by_key.values(), key=lambda finding: finding.first)


def path_of(run: RunFindings) -> Path:
    """Returns the file of a mesh and a host. Raises OSError."""
    name, host = (re.sub(r"[^\w.-]", "_", text)[:40] for text in (run.name, run.host))
    return mesh_files.folder() / f"{name}.{run.uid}.{host}.findings"


def write(run: RunFindings) -> None:
    """Writes a file, whole or not at all. Raises OSError."""
    write_private(path_of(run), msgspec.json.encode(run))


def read(path: Path) -> RunFindings:
    """Reads a file. Raises ValueError with the reason if it cannot be read."""
    try:
        return json_decoder(RunFindings).decode(read_private(path))
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def all_files() -> list[Path]:
    """Returns all files, the oldest first, after removing those of a week ago."""
    files = []
    for path in mesh_files.folder().glob("*.findings"):
        with contextlib.suppress(OSError):
            modified = path.stat().st_mtime
            if time.time() - modified > _STORED_S:
                path.unlink()
            else:
                files.append((modified, path))
    return [path for _, path in sorted(files)]
