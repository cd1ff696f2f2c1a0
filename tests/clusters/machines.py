"""Machines with OpenSSH servers, each in a network namespace of its own, and cables between that can be pulled."""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.network import Network
from tests.cluster.engine_tools import PYTHON, SSHServer, command_of
from tests.clusters.console import Console
from tests.processes import alive


class Machines:
    """So many machines with sshd, and one without for the controller, whose end of the network is 0."""

    def __init__(self, folder: Path, count: int, settings: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.network = Network(count + 1)
        self.servers: list[SSHServer] = []
        self.consoles: list[Console] = []
        try:
            for end in range(1, count + 1):
                variables = {"SetEnv": f"XDG_STATE_HOME={self.state(end)} MONARCH_NB_PRELOAD= ", **settings}
                address, name = self.network.addresses[end], self.network.names[end]
                self.servers.append(SSHServer(folder, address, name, **variables))
        except BaseException:
            self.close()
            raise

    def state(self, end: int) -> Path:
        """The folder in which a machine keeps files of users."""
        return self.folder / f"there-{end}"

    def console(self, **env: str) -> Console:
        """A controller at its end of the network, with HOME and state of its own."""
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "here"), "MONARCH_NB_PRELOAD": ""}
        console = Console(self.folder, *self.network.inside(0), **{**home, **env})
        self.consoles.append(console)
        return console

    def job(self, options: str = "") -> str:
        """A line that makes a job called `job`, a host on each machine."""
        server = self.servers[0]
        return (
            "from monarch_nb.job import SSHJob\n"
            f"job = SSHJob({PYTHON!r}, '-i {server.identity}', known_hosts={str(server.known_hosts)!r}, "
            f"meshes={{'trainers': {[server.name for server in self.servers]}}}, "
            f"env={{'MONARCH_NB_PRELOAD': ''}}, {options})\n"
        )

    def agents(self, end: int) -> list[int]:
        """The processes of the host agents on a machine."""
        pgrep = subprocess.run(["pgrep", "-f", "monarch_nb.job.worker"], capture_output=True, text=True, check=False)
        return [pid for pid in map(int, pgrep.stdout.split()) if str(self.state(end)) in command_of(pid)]

    def close(self) -> None:
        for console in self.consoles:
            if console.process.returncode is None:
                console.kill()
        for server in self.servers:
            server.close()
        for name in self.network.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, inside.stdout.split()):
                if alive(pid):
                    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pid)], check=False, capture_output=True)
        self.network.close()
