"""Starts and supervises the agents of jobs on its machine, for an adapter that has only a pipe to that machine.

Requests are lines of JSON on stdin, and each is answered by one line on stdout. The helper ends with its stdin; agents
live on, and another helper finds them again.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from monarch_nb._private import write_private
from monarch_nb.host.launch import command
from monarch_nb.job.adapter import Agent, Agents, EngineError, Running, Seen, state_folder
from monarch_nb.job.process import ProcessAdapter
from monarch_nb.job.report import HELLO, KEPT_S, Ask, HelperReply, newest
from monarch_nb.wire import json_decoder

_AGENTS = "mnb-agents-"  # of the names of folders, one for each job
_LIST = "agents.json"
_READY_S = 60.0
_LOOK_S = 0.01
_LOGIN_S = ("XDG_RUNTIME_DIR",)  # its folder is removed at logout, which agents outlive


class Helper:
    """Answers requests."""

    def __init__(self) -> None:
        self._processes = ProcessAdapter()

    def answer(self, ask: Ask) -> HelperReply:
        """Executes a request; blocks until it is done."""
        if not ask.job.replace("-", "").isalnum():
            return HelperReply(error=f"{ask.job!r} is not the id of a job")
        folder = state_folder() / f"{_AGENTS}{ask.job}"
        try:
            if ask.do == "start":
                self._tidy()
                return self._start(ask, folder)
            job = self._job_of(ask, folder)
            if ask.do == "look":
                return HelperReply(seen=dict(self._processes.look(job)))
            if ask.do == "lines":
                return HelperReply(lines={name: self._processes.lines(job, name, ask.count) for name in job.agents})
            self._end(job, folder, ask.names if ask.do == "end" else job.agents)
            return HelperReply()
        except (OSError, EngineError, msgspec.MsgspecError) as error:
            return HelperReply(error=f"{type(error).__name__}: {error}")

    def _start(self, ask: Ask, folder: Path) -> HelperReply:
        folder.mkdir(mode=0o700, exist_ok=True)
        agents: dict[str, Agent] = {}
        try:
            for name, env in ask.names.items():
                line = command("monarch_nb.job.worker", ask.address, "--key", "-", "--report", folder / f"{name}.json",
                               "--known-as", ask.known_as, *["--bound"] * ask.bound,
                               *([] if ask.keep_s is None else ["--keep", ask.keep_s]))  # fmt: skip
                agents[name] = self._processes.start_one(line, name, "", folder, env, ask.key.encode())
            self._list(folder, agents, ())
            return HelperReply(seen=dict(self._until_ready(Running(ask.job, str(folder), agents))))
        except BaseException:
            self._end(Running(ask.job, str(folder), agents), folder, agents)
            raise

    def _tidy(self) -> None:
        """Removes folders of jobs whose agents here have ended by themselves, some time after that."""
        for folder in state_folder().glob(f"{_AGENTS}*"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                lists = list(folder.glob(f"*.{_LIST}"))
                own = [path for path in lists if path.name.startswith(f"{os.uname().nodename}.")]
                job = Running("", str(folder), {name: agent for path in own for name, agent in _read(path).items()})
                ended = all(state.state == "ended" for state in self._processes.look(job).values())
                if lists == own and ended and time.time() - newest(folder) > KEPT_S:
                    shutil.rmtree(folder, ignore_errors=True)

    def _until_ready(self, job: Running) -> dict[str, Seen]:
        deadline = time.monotonic() + _READY_S
        while True:
            states = dict(self._processes.look(job))
            if time.monotonic() > deadline or all(state.state == "ended" or state.joins for state in states.values()):
                return states
            time.sleep(_LOOK_S)

    def _list(self, folder: Path, add: Agents, drop: Collection[str]) -> Agents:
        """Updates and returns the list of agents; several helpers may do so.

        Machines that share a home folder each have a list of their own.
        """
        file = folder / f"{os.uname().nodename}.{_LIST}"
        with open(folder / f".{os.uname().nodename}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            agents = {name: agent for name, agent in {**_read(file), **add}.items() if name not in drop}
            if agents:
                write_private(file, msgspec.json.encode(agents))
            else:
                file.unlink(missing_ok=True)
            return agents

    def _job_of(self, ask: Ask, folder: Path) -> Running:
        return Running(ask.job, str(folder), _read(folder / f"{os.uname().nodename}.{_LIST}"))

    def _end(self, job: Running, folder: Path, names: Collection[str]) -> None:
        self._processes.end({name: agent for name, agent in job.agents.items() if name in names})
        for name in names:
            for file in (folder / f"{name}.json", folder / f"{name}.log"):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # gone already, or with agents of another machine
            if not self._list(folder, {}, names) and not any(folder.glob(f"*.{_LIST}")):
                shutil.rmtree(folder, ignore_errors=True)


def _read(file: Path) -> dict[str, Agent]:
    with contextlib.suppress(FileNotFoundError):
        return json_decoder(dict[str, Agent]).decode(file.read_bytes())
    return {}


def main(argv: Sequence[str] = ()) -> int:
    """Answers until stdin ends."""
    for name in _LOGIN_S:
        os.environ.pop(name, None)
    out, helper = sys.stdout, Helper()
    sys.stdout = sys.stderr
    out.write(f"{HELLO} 1}}\n")
    out.flush()
    for line in sys.stdin.buffer:
        ask = None
        try:
            ask = json_decoder(Ask).decode(line)
            answer = helper.answer(ask)
        except msgspec.MsgspecError as error:
            answer = HelperReply(error=f"not a request: {error}")
        try:
            out.write(msgspec.json.encode(answer).decode() + "\n")
            out.flush()
        except BrokenPipeError:  # the requester will not learn of the agents just started
            if ask is not None and ask.do == "start":
                helper.answer(Ask(do="end", job=ask.job, names=ask.names))
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
