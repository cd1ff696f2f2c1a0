"""Jobs on machines that are reached by SSH."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Literal, NoReturn

from monarch_nb.job.adapter import Role, register_job
from monarch_nb.job.adapter_job import AdapterJob

__all__ = ["SSHJob"]

_TRANSPORTS = ("tcp",)


class _MachineJob(AdapterJob):
    """Machines that are named one by one: `add_mesh(name, machines)` before the job is applied."""

    def __init__(
        self, kind: str, machines: Mapping[str, Sequence[str]], env: Mapping[str, str] | None,
        gpus: int | None, options: Mapping[str, object], patience: float | None, spares: int = 0,
    ) -> None:  # fmt: skip
        if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
            raise ValueError(f"spares={spares!r} must be a whole number of machines of each mesh, 0 for none")
        super().__init__(kind, {}, env, options={**options, "machines": {}}, patience=patience)
        self._gpus, self._spares_per_mesh = gpus, spares  # number of spares among the machines of each mesh
        for name, hosts in machines.items():
            self.add_mesh(name, hosts)

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Adds a mesh of these machines, in this order; the last ones are its spares, if the job has any.

        Raises ValueError for none, and after the job was applied.
        """
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f"{name}={hosts!r}: a mesh needs a list of machines, such as ['node1', 'user@node2:2222']")
        if self.active:
            raise ValueError("the job runs: a mesh can only be added before")
        machines, spares = {**self._options["machines"], name: list(hosts)}, self._spares_per_mesh
        if len(hosts) <= spares:
            raise ValueError(f"{name} has {len(hosts)} machines, of which {spares} are to be spares: name more of them")
        self._wish(
            {mesh: Role(hosts=len(names) - spares, spares=spares, gpus=self._gpus) for mesh, names in machines.items()}
        )
        self._options = {**self._options, "machines": machines}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"ssh_args: {message}; -i, -p, -l, -F, -J and -o UserKnownHostsFile=FILE are understood here, "
            "all else belongs into ~/.ssh/config"
        )


def _read_ssh_args(words: Sequence[str]) -> dict[str, object]:
    """Returns arguments of ssh as asyncssh's options, as plain data. Raises ValueError for an unknown one."""
    parser = _Parser(add_help=False)
    parser.add_argument("-i", dest="client_keys", action="append")
    parser.add_argument("-p", dest="ssh_port", type=int)
    parser.add_argument("-l", dest="username")
    parser.add_argument("-F", dest="config", action="append")
    parser.add_argument("-J", dest="tunnel")
    parser.add_argument("-o", dest="settings", action="append", default=[])
    options = vars(parser.parse_args(list(words)))
    for setting in options.pop("settings"):
        name, _, value = setting.partition("=")
        if name.lower() != "userknownhostsfile" or not value:
            parser.error(f"-o {setting} is not understood")
        options["known_hosts"] = value
    return {name: value for name, value in options.items() if value is not None}


class SSHJob(_MachineJob):
    """A host agent on each of these machines, started over SSH: `SSHJob(meshes={"trainers": ["node1", "me@node2"]})`.

    A machine is `[user@]name[:port]`, its name also an address (of IPv6 as `fd00::7`, or `[fd00::7]:2222` with a port),
    or a name of `~/.ssh/config`, which is honoured with keys, agents and jump hosts; there is no prompt for passwords.
    The last `spares` machines of each mesh wait to replace lost ones; `more` are machines that meshes may grow onto.
    `python_exe` is the interpreter there, with monarch-nb installed. `gpus` on each machine are checked when it joins.
    `reach` is the way to the agents: `"direct"` at a port of the machine (`monarch_port`, else any
    that is free), `"tunnel"` through the SSH connection, so that no other port needs to be open, `"auto"` directly
    where that works. The job's key goes over the connection, on no command line. The agents live on when the client
    ends or the connection breaks; `kill()` ends them.

    Needs `pip install 'monarch-nb[ssh]'`. Raises EngineError, naming each machine, where agents cannot be started.
    """

    def __init__(
        self, python_exe: str = "python3", ssh_args: Sequence[str] | str = (), monarch_port: int = 0,
        transport: str = "tcp", *, meshes: Mapping[str, Sequence[str]] | None = None,
        env: Mapping[str, str] | None = None, gpus: int | None = None, user: str | None = None,
        known_hosts: str | None = None, reach: Literal["auto", "direct", "tunnel"] = "auto", more: Sequence[str] = (),
        spares: int = 0,
    ) -> None:  # fmt: skip
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport={transport!r}: agents of an SSHJob speak tcp, encrypted with the job's key")
        if reach not in ("auto", "direct", "tunnel"):
            raise ValueError(f"reach={reach!r} is none of 'auto', 'direct', 'tunnel'")
        words = shlex.split(ssh_args) if isinstance(ssh_args, str) else ssh_args
        options = {"python": python_exe, "port": monarch_port, "reach": reach, **_read_ssh_args(words)}
        if isinstance(more, str):
            raise ValueError(f"more={more!r}: a list of machines, such as ['node7']")
        if more:
            options["more"] = list(more)
        if user is not None:
            options["username"] = user
        if known_hosts is not None:
            options["known_hosts"] = known_hosts
        super().__init__("ssh", meshes or {}, env, gpus, options, None, spares)


register_job("ssh", lambda: import_module("monarch_nb.job.ssh.adapter").SSH())
