"""Processes of this machine as the hosts of jobs: what starts, finds and ends them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from monarch_nb.host.folders import base_folder
from monarch_nb.job.adapter import PREFIX, Agent, Agents, AgentsWanted, Running

_ENDING_S = 2.0  # for a worker to end all that is on it, which it does at once; then it is killed itself
_LAST_LINES = 5
_LIST = "agents.json"  # in the folder of a job: which agents it has


class _Listed(msgspec.Struct):
    job: str
    agents: dict[str, Agent]


class Processes:
    """Each agent has a process of its own as its worker. Their ids are `process id @ when that process began`."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # workers that this process has started

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts a worker for each name; they write to files in the job's folder."""
        agents: dict[str, Agent] = {}
        try:
            for name in wanted.names:
                with open(wanted.folder / f"{name}.log", "wb") as log:
                    process = subprocess.Popen(
                        wanted.command(wanted.join(name)), env={**os.environ, **wanted.environment},
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    )  # fmt: skip
                self._children[process.pid] = process
                agents[name] = agent_of_process(process.pid, wanted.join(name))
            (wanted.folder / _LIST).write_bytes(msgspec.json.encode(_Listed(wanted.job, agents)))
        except BaseException:  # an interrupt too: nothing of a half-made job may stay
            self.kill(agents)
            raise
        return agents

    def ended(self, agents: Agents) -> Mapping[str, str]:
        """The workers that have ended, with the last lines that they wrote."""
        return {
            name: f"(process {process_of(agent)[0]}) has ended{_last_words(name, agent)}"
            for name, agent in agents.items()
            if not self._alive(agent)
        }

    def kill(self, agents: Agents) -> None:
        """Ends workers by SIGTERM, which ends all that is on their hosts; by SIGKILL if that does not help."""
        deadline = time.monotonic() + _ENDING_S
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for agent in agents.values():
                if self._alive(agent):
                    os.kill(process_of(agent)[0], signum)
            if self._await_end(agents, deadline):
                break
            deadline = time.monotonic() + _ENDING_S
        for agent in agents.values():
            process = self._children.pop(process_of(agent)[0], None)
            if process is not None:
                process.wait(_ENDING_S)

    def running(self) -> Mapping[str, Running]:
        """The jobs whose folders say so, and of which processes live."""
        jobs: dict[str, Running] = {}
        for file in Path(base_folder()).glob(f"{PREFIX}*/{_LIST}"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # it ends just now
                listed = msgspec.json.decode(file.read_bytes(), type=_Listed)
                if any(map(self._alive, listed.agents.values())):
                    jobs[listed.job] = Running(str(file.parent), listed.agents)
        return jobs

    def _alive(self, agent: Agent) -> bool:
        pid, birth = process_of(agent)
        process = self._children.get(pid)
        if process is not None:
            return process.poll() is None
        return bool(birth) and born(pid) == birth

    def _await_end(self, agents: Agents, deadline: float) -> bool:
        """Blocks until workers and their agents are gone."""
        while True:
            sockets = (agent.join.removeprefix("ipc://") for agent in agents.values())
            if not any(map(self._alive, agents.values())) and not any(map(os.path.exists, sockets)):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def agent_of_process(pid: int, join: str) -> Agent:
    """The agent that a process keeps at an address."""
    return Agent(f"{pid}@{born(pid)}", join)


def process_of(agent: Agent) -> tuple[int, str]:
    """The worker of an agent: its process id, which is no group's or everybody's, and when it began."""
    pid, _, birth = agent.id.partition("@")
    return (int(pid), birth) if pid.isdecimal() and int(pid) > 1 else (0, "")


def _last_words(name: str, agent: Agent) -> str:
    try:
        log = Path(agent.join.removeprefix("ipc://")).with_name(f"{name}.log")
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "".join(f"\n  | {line}" for line in lines[-_LAST_LINES:])


def born(pid: int) -> str:
    """When a process began, in a form that no other process with its id will have; empty if there is none."""
    try:
        if os.path.exists(
            "/proc/self/stat"
        ):  # clock ticks since the boot: unlike a time, they stay when clocks are set
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return ""
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return ""
