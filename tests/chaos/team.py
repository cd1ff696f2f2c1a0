"""The job that is troubled: three hosts in namespaces of their own, and a controller in another."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from monarch_nb.transport import Keys
from tests.chaos.network import Network
from tests.cluster.hosts_tools import HostProcess

PORT = 22222


class Team:
    """Agents and the controller, which say and do what the director wants."""

    def __init__(self, folder: Path, hosts: int, env: dict[str, str]) -> None:
        self.folder, self._env = folder, env
        self.key = folder / "job.key"
        Keys.load_or_create(self.key)
        self.pids: list[int] = []  # of the ranks, in order
        self.killed: set[str] = set()  # ledgers of controllers that were killed
        self.stories: list[str] = []  # how controllers came to their mesh
        self._controllers = 0
        self.network = Network(hosts + 1)
        self.agents: list[HostProcess] = []
        try:
            for host in range(hosts):
                self.agents.append(self._agent(host))
            self.start_controller()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """What the text of an error has to name, one of them at least."""
        return ("workers", "callers", "team", *{agent.host for agent in self.agents})

    def _agent(self, host: int, *options: str) -> HostProcess:
        at = f"tcp://{self.network.addresses[host + 1]}:{PORT}"
        return HostProcess(
            self.folder, *options, key=self.key, tcp=at, env=self._env, before=self.network.inside(host + 1)
        )

    def kill_agent(self, host: int) -> None:
        """It ends at once, and its processes notice."""
        self.agents[host].process.kill()
        self.agents[host].process.wait()

    def start_agent(self, host: int) -> None:
        """Another one of the same name at the same place."""
        self.agents[host] = self._agent(host, "--host", self.agents[host].host)

    def start_controller(self) -> None:
        """The first one spawns, later ones attach what is there."""
        number, self._controllers = self._controllers, self._controllers + 1
        words = [sys.executable, "-m", "tests.chaos.program", str(self.folder), str(number), str(self.key)]
        with open(self.folder / f"controller-{number}.log", "wb") as errors:
            self.controller = subprocess.Popen(
                [*self.network.inside(0), *words, *(agent.endpoint for agent in self.agents)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **self._env},
            )  # fmt: skip
        self.stories.append(self.hear(120)["how"])

    def kill_controller(self) -> None:
        """It ends in the middle of what it does."""
        self.killed.add(f"ledger-{self._controllers - 1}")
        self.controller.kill()
        self._leave()

    def ask(self, within: float, **words: Any) -> Any:
        """Give the controller a command; its answer. Raises TimeoutError, or EOFError if it has ended."""
        assert self.controller.stdin is not None
        self.controller.stdin.write(json.dumps(words).encode() + b"\n")
        self.controller.stdin.flush()
        return self.hear(within)

    def hear(self, seconds: float) -> Any:
        """What the controller says next, a line. Raises TimeoutError, or EOFError if it has ended."""
        out = self.controller.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], seconds)
        log = self.folder / f"controller-{self._controllers - 1}.log"
        if not ready:
            self.controller.send_signal(12)  # SIGUSR2: where its threads are
            time.sleep(1)
            raise TimeoutError(f"the controller said nothing for {seconds:g} s, see {log}")
        line = out.readline()
        if not line:
            raise EOFError(f"the controller has ended with {self.controller.wait()}:\n{log.read_text()[-3000:]}")
        return json.loads(line)

    def _leave(self) -> None:
        self.controller.wait(30)
        for pipe in (self.controller.stdin, self.controller.stdout):
            assert pipe is not None
            pipe.close()

    def end(self) -> None:
        """The controller stops its mesh and ends, then the agents do."""
        assert self.ask(120, do="end") == {"ended": True}
        self._leave()
        for agent in self.agents:
            agent.close()

    def close(self) -> None:
        if self._controllers:
            self.controller.kill()
            self.controller.wait()
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        self.network.close()
