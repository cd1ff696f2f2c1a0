"""The job that is troubled: its hosts, and a controller that the director commands."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.program import SLOTS
from tests.chaos.sites import Site


class Team:
    """The controller, and the processes of the ranks it has spawned."""

    def __init__(self, folder: Path, hosts: Site) -> None:
        self.folder, self.hosts = folder, hosts
        self.pids: list[int] = []  # of the ranks, in order
        self.killed: set[str] = set()  # ledgers of controllers that were killed
        self.lost: list[str] = []  # answers that a killed controller had not read, and the next one does not have
        self.arrivals: list[str] = []  # how controllers came to their mesh
        self._controllers = 0
        try:
            self.start_controller()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of which the text of an error must have one at least."""
        return ("workers", "callers", "team", *self.hosts.names())

    @property
    def network(self) -> Any:
        """The network between the hosts; there is none on Slurm."""
        return self.hosts.network

    def ranks_of(self, host: int) -> list[int]:
        """Returns the processes of the ranks of a host."""
        return self.pids[host * SLOTS : (host + 1) * SLOTS]

    def agent(self, host: int) -> int:
        """Returns the process of the agent of a host; 0 if it has ended."""
        return self.hosts.agent(host, self.ranks_of(host))

    def kill_agent(self, host: int) -> None:
        """It ends at once, and its processes notice."""
        self.hosts.kill_agent(host, self.ranks_of(host))

    def start_controller(self) -> None:
        """The first one spawns, later ones attach the existing mesh."""
        number, self._controllers = self._controllers, self._controllers + 1
        words = [sys.executable, "-m", "tests.chaos.program", str(self.folder), str(number)]
        inside = self.network.inside(0) if self.network is not None else ()
        (self.folder / "hosts.json").write_text(json.dumps(self.hosts.how()))
        with open(self.folder / f"controller-{number}.log", "wb") as errors:
            self.controller = subprocess.Popen(
                [*inside, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, **self.hosts.env},
            )  # fmt: skip
        answer = self.hear(240)
        self.arrivals.append(answer["how"])
        self.lost += answer["lost"]

    def kill_controller(self) -> None:
        """It ends in the middle of its work."""
        self.killed.add(f"ledger-{self._controllers - 1}")
        self.controller.kill()
        self._leave()

    def detach_controller(self) -> None:
        """It leaves its mesh, and ends."""
        assert self.ask(180, do="detach") == {"ended": True}
        self._leave()

    def ask(self, within: float, **words: Any) -> Any:
        """Give the controller a command; its answer. Raises TimeoutError, or EOFError if it has ended."""
        assert self.controller.stdin is not None
        self.controller.stdin.write(json.dumps(words).encode() + b"\n")
        self.controller.stdin.flush()
        return self.hear(within)

    def hear(self, seconds: float) -> Any:
        """The next line of the controller. Raises TimeoutError, or EOFError if it has ended."""
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
        """The controller stops its mesh, and its job, and ends; then agents do that a user has started."""
        assert self.ask(180, do="end") == {"ended": True}
        self._leave()
        self.hosts.end()

    def close(self) -> None:
        if self._controllers:
            self.controller.kill()
            self.controller.wait()
        self.hosts.close()
