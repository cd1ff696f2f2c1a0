"""Addresses of processes: `host/name`. The only module that composes and parses them.

`h1/agent` is a host's agent, `h1/p3.2.0` rank 2 of the proc mesh p3 in its incarnation 0, `h1/c9f2.0.0` a controller.
In headers, and wherever they are only passed on, addresses are plain text.
"""

from functools import lru_cache
from typing import NamedTuple

_AGENT = "agent"
_LONGEST = 40  # characters of a rank and an incarnation: longer texts are invalid
_CONTROLLER = "c"  # begins the names of controllers, which no agent has started


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
