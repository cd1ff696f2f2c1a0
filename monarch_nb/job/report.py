"""Files that the starter of a job's agents and the agents write for each other: a list of hosts, reports of agents."""

import os
import platform
import socket
import sys
from pathlib import Path
from typing import Literal

import msgspec

from monarch_nb._package import __version__
from monarch_nb.host.gpus import devices
from monarch_nb.host.linux import boot_id
from monarch_nb.job.adapter import Seen
from monarch_nb.wire import json_decoder

HELLO = '{"monarch-nb helper":'  # begins the first line, after any output of a login shell


class WantedHost(msgspec.Struct, frozen=True):
    """A host in the list of a job's hosts, which their starter writes."""

    name: str
    env: dict[str, str] = {}


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One agent that listens."""

    host: str  # the id of its host
    pid: int  # of its worker
    joins: tuple[str, ...]  # addresses to reach it, the likeliest first
    machine: str
    boot: str  # the same for all that runs on one machine
    python: str
    version: str
    gpus: int
    ended: str = ""  # how its agent ended, other than by a shutdown


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the helper of a machine, about the agents of one job on this machine."""

    do: Literal["start", "look", "kill", "end", "lines"]
    job: str
    names: dict[str, dict[str, str]] = {}  # start: the environment of each; end: the agents to end
    address: str = "tcp://0.0.0.0:0"  # start: where the agents listen
    known_as: str = ""  # start: the requester's name of this machine
    key: str = ""  # start: the job's key, as in its file
    count: int = 0  # lines
    bound: bool = False  # start: agents end with this process
    keep_s: float | None = None  # start: how long agents live on when no program uses them


class HelperReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The helper's answer; `error` if it failed."""

    seen: dict[str, Seen] = {}
    lines: dict[str, list[str]] = {}
    error: str = ""


def report(host: str, joins: tuple[str, ...]) -> AgentReport:
    """Returns the report of an agent on this machine, whose worker is this process."""
    return AgentReport(host=host, pid=os.getpid(), joins=joins, machine=platform.node(), boot=boot_id(),
                  python=sys.version.split()[0], version=__version__, gpus=len(devices()))  # fmt: skip


def write_report(path: Path, content: AgentReport) -> None:
    """Writes a report to a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


def read_report(path: Path) -> AgentReport | None:
    """Reads the report in a file; None while there is none."""
    try:
        return json_decoder(AgentReport).decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def own_addresses(port: int, known_as: str = "") -> tuple[str, ...]:
    """Returns addresses of a port of this machine for others: the name it is known as, its own name, its addresses."""
    names = [known_as, socket.getfqdn(), platform.node(), *_numbers()]
    usable = [name for name in names if name and not name.startswith(("localhost", "127.")) and name != "::1"]
    return tuple(f"tcp://{f'[{name}]' if ':' in name else name}:{port}" for name in dict.fromkeys(usable))


def _numbers() -> list[str]:
    """Returns IP addresses from which this machine would connect to others, without sending anything."""
    addresses = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                addresses.append(probe.getsockname()[0])
        except OSError:
            continue
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return addresses
    return addresses + [str(entry[4][0]).partition("%")[0] for entry in entries]
