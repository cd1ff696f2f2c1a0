"""Addresses of processes: `host/name`, and the ids and names of hosts. The only module that composes and parses them.

`h1/agent` is a host's agent, `h1/p3.2.0` rank 2 of the proc mesh p3 in its incarnation 0, `h1/c9f2.0.0` a controller.
In headers, and wherever they are only passed on, addresses are plain text.

An id of a host such as `node7.1f2e3d` has the name of the machine and a token: several hosts may be on one machine, and
another kernel may have started one there before. Users see `node7`, and for a second one there that the controller
meets `node7·2`: so the same program shows the same names each time. Only a controller gives names. Other processes meet
hosts in another order and would call the same host something else, so they write ids; a controller replaces these in
texts that arrive.
"""

import platform
import re
import threading
from functools import lru_cache
from typing import NamedTuple

_AGENT = "agent"
_LONGEST = 40  # characters of a rank and an incarnation: longer texts are invalid
_CONTROLLER = "c"  # begins the names of controllers, which no agent has started
# Characters of a machine's name in an id: sockets are in folders of that name, and their paths are short.
_LONGEST_NAME = 20
_TOKEN = r"\.(?:[0-9a-f]{10}|[0-9a-f]{6})"
_ID = re.compile(rf"(.+){_TOKEN}")
# An id in a text, also at the start of an address and before the full stop of a sentence, but not in a path.
_WRITTEN = re.compile(rf"(?<![\w./~-])[\w~-]+{_TOKEN}(?!\.?[\w-])")
_names: dict[str, str] | None = None  # by id; None in a process that is no controller
_counts: dict[str, int] = {}  # of hosts, by the machine's name
_naming = threading.Lock()


class Address(NamedTuple):
    """The parts of an address. `mesh`, `rank` and `incarnation` are those of procs and controllers."""

    host: str
    name: str  # of the process on its host, and of its socket
    mesh: str = ""
    rank: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.host}/{self.name}"

    @property
    def is_agent(self) -> bool:
        """True for a host agent's address."""
        return self.name == _AGENT

    @property
    def is_controller(self) -> bool:
        """True for the address of a process that no agent has started."""
        return self.name.startswith(_CONTROLLER)

    @property
    def is_proc(self) -> bool:
        """True for the address of a proc of a mesh."""
        return self.mesh != "" and not self.is_controller

    @property
    def place(self) -> tuple[str, int, int]:
        """Mesh, rank and incarnation."""
        return self.mesh, self.rank, self.incarnation


@lru_cache(4096)
def parse_address(address: str) -> Address:
    """Splits an address; a malformed one results in a host or a name at most."""
    host, _, name = address.partition("/")
    mesh, dot, numbers = name.partition(".")
    rank, _, incarnation = numbers.partition(".")
    if dot and len(numbers) <= _LONGEST and rank.isdecimal() and incarnation.isdecimal():
        return Address(host, name, mesh, int(rank), int(incarnation))
    return Address(host, name)


def host_of(address: str) -> str:
    """Returns the host of a process; a host's own name is returned unchanged."""
    return address.partition("/")[0]


def agent_of(host: str) -> str:
    """Returns the address of a host's agent."""
    return f"{host}/{_AGENT}"


def proc_address(host: str, mesh: str, rank: int, incarnation: int) -> str:
    """Returns the address of one rank of a proc mesh."""
    return f"{host}/{mesh}.{rank}.{incarnation}"


def controller_address(host: str, token: str) -> str:
    """Returns the address of a controller; `token` distinguishes it from others on its host."""
    return f"{host}/{_CONTROLLER}{token}.0.0"


def host_id(token: str, machine: str | None = None) -> str:
    """Returns the id of a host on a machine, by default this one."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", (platform.node() if machine is None else machine).partition(".")[0])
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2 - 1]}~{name[-_LONGEST_NAME // 2 :]}"
    return f"{name or 'host'}.{token}"


def host_name(host: str) -> str:
    """Returns the name that a controller gives to a host, or to each of several with commas between them.

    In other processes, and for an id chosen by a user, it is the id.
    """
    if _names is None:
        return host
    if ", " in host:
        return ", ".join(map(host_name, host.split(", ")))
    parts = _ID.fullmatch(host)
    if parts is None:
        return host
    with _naming:
        if host not in _names:
            machine = parts[1]
            count = _counts[machine] = _counts.get(machine, 0) + 1
            _names[host] = machine if count == 1 else f"{machine}·{count}"
        return _names[host]


def with_host_names(text: str) -> str:
    """Returns a text, such as another process's error, with the ids of hosts replaced by their names here.

    Ids of unknown hosts stay, and so does the whole text in a process that is no controller.
    """
    if not _names or "." not in text:
        return text
    names = _names
    return _WRITTEN.sub(lambda match: names.get(match[0], match[0]), text)


def begin_host_names() -> None:
    """Makes this process the controller of a new cluster, which gives names from now on; earlier names are void."""
    global _names
    with _naming:
        _names = {}
        _counts.clear()
