"""Programs written for torchrun, on a proc mesh: the environment of torch.distributed, set up and set up again."""

import math
import runpy
import socket
import sys
from collections.abc import Sequence
from typing import Any

from monarch_nb.actor import Actor, ProcMesh, current_rank, endpoint
from monarch_nb.collectives.environment import free_port, fresh_number, of_rank
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.compat.network import AddrType, get_ipaddr

__all__ = ["AddrType", "SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]

_NAME = "_SPMDActor"


class SPMDActor(Actor):
    """Sets up what torchrun would, from its place in the mesh, and runs scripts; see `setup_torch_elastic_env`.

    The last dimension of the mesh counts the processes of a host.
    """

    def __init__(self) -> None:
        place = current_rank()
        sizes = dict(place.extent)
        last = place.extent.labels[-1] if sizes else ""
        self.rank = place.rank
        self.world_size = math.prod(sizes.values())
        self.local_rank = place[last] if sizes else 0
        self.local_world_size = self.nproc_per_node = sizes[last] if sizes else 1
        self.group_rank = self.rank // self.local_world_size
        self.group_world_size = -(-self.world_size // self.local_world_size)

    def _set(self, master_addr: str, master_port: int, number: int) -> None:
        PROCESS_GROUPS.give_up(number, everything=True)
        master = (master_addr, master_port)
        wanted = of_rank(self.rank, self.world_size, self.local_rank, self.local_world_size, master)
        PROCESS_GROUPS.set_environment(wanted, forced=True)

    @endpoint
    def get_host_port(self, use_ipaddr: AddrType | None = None) -> tuple[str, int]:
        """This host's name, or its IP address, and a TCP port that is free now."""
        name = socket.gethostname()
        if use_ipaddr is not None:
            return get_ipaddr(name, 0, use_ipaddr), free_port()
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror:  # a host whose own name leads nowhere: this machine alone can be meant
            name = "localhost"
        return name, free_port()

    @endpoint
    def setup_env(self, master_addr: str, master_port: int, number: int = 0) -> None:
        """Sets the environment; process groups of before are given up, for they may have dead members.

        Names of new groups begin at `number`, where one is given: a store that was used before may have others.
        """
        self._set(master_addr, master_port, number or master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Runs a script as torchrun would: `["-m", module, ...]` or `[path, ...]`. Gives True when it has ended well.

        Raises ValueError without a script, and what the script raises; sys.exit(0) is a good end.
        """
        if not script_args or list(script_args) == ["-m"]:
            raise ValueError("main: neither a script nor a module is given, such as ['train.py'] or ['-m', 'train']")
        self._set(master_addr, master_port, master_port)
        arguments = sys.argv
        try:
            if script_args[0] == "-m":
                sys.argv = list(script_args[1:])
                runpy.run_module(script_args[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(script_args)
                runpy.run_path(script_args[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{' '.join(script_args)} ended with status {end.code}") from end
        finally:
            sys.argv = arguments
        return True


def _checked(mesh: ProcMesh, master_addr: str | None, master_port: int | None) -> Any:
    if (master_addr is None) != (master_port is None):
        raise ValueError("give both master_addr and master_port, or neither: then the first process is the master")
    return mesh.spawn(_NAME, SPMDActor)


def _first(actors: Any) -> Any:
    return actors.slice(**dict.fromkeys(actors.extent, 0))


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Sets, in each process, what torchrun would: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT...

    The first process is the master unless one is named. To be called again after a heal: groups of before are let go
    everywhere, and `init_process_group` makes new ones of all that are there. Blocks.
    Raises ValueError for half a master, SupervisionError when a process is gone.
    """
    actors = _checked(proc_mesh, master_addr, master_port)
    try:
        if master_addr is None:
            master_addr, master_port = _first(actors).get_host_port.call_one(use_ipaddr).get()
        actors.setup_env.call(master_addr, master_port, fresh_number()).get()
    finally:
        actors.stop()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Like `setup_torch_elastic_env`, without blocking the event loop."""
    actors = _checked(proc_mesh, master_addr, master_port)
    try:
        if master_addr is None:
            master_addr, master_port = await _first(actors).get_host_port.call_one(use_ipaddr)
        await actors.setup_env.call(master_addr, master_port, fresh_number())
    finally:
        actors.stop()
