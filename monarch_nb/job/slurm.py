"""Slurm jobs: an agent on each allocated node, started by srun inside a batch job."""

import contextlib
import importlib
import ipaddress
import json
import os
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from monarch_nb.host.preemption import END
from monarch_nb.job.adapter import (
    ALL_LINES,
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    Seen,
    living_jobs,
    log_words,
    register_job,
)
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.report import ask, last_lines, prepare, read_report, refresh_folder, seen_of, worker_line
from monarch_nb.wire import counted

_PACKAGE = "Slurm's commands must be on the PATH: run this on a login node, or inside a job"
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED"}
_ENDS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "has reached its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted by another job",
    "OUT_OF_MEMORY": "ran out of memory",
    "BOOT_FAIL": "could not start its nodes",
    "DEADLINE": "has reached its deadline",
    "COMPLETED": "has ended",
    "COMPLETING": "is ending",
    "FAILED": "has failed",
}
# A job that is being cleaned up may be reported as COMPLETING alone: the reason then has how it ended.
_CODES = {"NonZeroExitCode": "FAILED", "TimeLimit": "TIMEOUT", "OutOfMemory": "OUT_OF_MEMORY", "NodeFail": "NODE_FAIL"}
# Reasons that do not pass by themselves, with advice.
_STUCK = {
    "PartitionConfig": "partition {partition} does not have {nodes} like that: ask for fewer or smaller ones, or "
    "name another partition",
    "PartitionNodeLimit": "partition {partition} does not give {nodes} to one job: ask for another number",
    "PartitionTimeLimit": "partition {partition} does not allow this time limit: give a shorter time_limit=",
    "PartitionDown": "partition {partition} starts no jobs: name another one, or ask an administrator",
    "PartitionInactive": "partition {partition} starts no jobs: name another one, or ask an administrator",
    "BadConstraints": "no nodes have what slurm_args= ask for",
    "JobHeldUser": "it is held: scontrol release {number}",
    "JobHeldAdmin": "an administrator holds it",
    "DependencyNeverSatisfied": "what it depends on has failed",
    "AccountNotAllowed": "this account may not use it: give another account=",
    "InvalidAccount": "this account may not use it: give another account=",
    "InvalidQOS": "this qos may not be used: give another qos=",
    "QOSNotAllowed": "this qos may not be used: give another qos=",
    "ReservationDeleted": "its reservation was deleted",
}
_LIMITS = re.compile(r"(Assoc|QOS)(Max\w*PerJob|\w*(PerJobLimit|MaxWallDurationPerJobLimit|MinCpuNotSatisfied))")
_KILL_S = 10.0
_TIDY_S = 3.0  # for agents that were asked to end
_LOOK_S = 0.2
OTHER_JOBS = "others"  # the file in a job's folder with the numbers of batch jobs that end with the one of the client
_OPTION = re.compile(r"-[-\w]+([ =].*)?")
# One agent per node, with all resources of the batch job there; agents of other nodes live on when one ends.
_SRUN = "srun --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=0 --label"


class SlurmJob(AdapterJob):
    """One host agent on each allocated node: `SlurmJob({"trainers": 4}, partition="gpu", gpus_per_node=8)`.

    Meshes with equal hosts share one batch job; a `Role` asks for others: `{"loaders": Role(hosts=2, cpus=16)}`.
    `python_exe` is the interpreter on the nodes, with monarch-nb installed; `slurm_args` are added as #SBATCH lines.
    The job's folder, `$XDG_STATE_HOME/monarch-nb/jobs`, must be shared with the nodes, as home folders are: the key is
    a file of mode 0600 there. Agents listen at any free port of their node, or at `monarch_port`, of `bind_to` alone if
    that is given. `state()` does not wait for the queue; the job is given up `job_start_timeout` seconds after it
    (None: never). With `out_of_cluster` the nodes are reached through the first of them that answers, or through
    `attach_to`, such as the local end of a forwarded port. `apply(client_script)` runs a script on the first node, and
    the allocation ends with it. Raises EngineError, with Slurm's message.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", python_exe: str = "python", slurm_args: Sequence[str] = (),
        monarch_port: int = 0, job_name: str = "monarch_job", ntasks_per_node: int = 1,
        time_limit: str | None = None, partition: str | None = None, log_dir: str | None = None,
        exclusive: bool = True, gpus_per_node: int | None = None, cpus_per_task: int | None = None,
        mem: str | None = None, job_start_timeout: float | None = None, account: str | None = None,
        qos: str | None = None, out_of_cluster: bool = False, attach_to: str | None = None,
        bind_to: str | None = None, *, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if bind_to is not None:
            try:
                ipaddress.ip_address(bind_to)
            except ValueError:
                raise ValueError(f"bind_to={bind_to!r} must be an IP address, without a port") from None
        options = {
            "python": python_exe, "slurm_args": list(slurm_args), "port": monarch_port, "job_name": job_name,
            "ntasks_per_node": ntasks_per_node, "time_limit": time_limit, "partition": partition,
            "log_dir": None if log_dir is None else os.path.abspath(log_dir), "exclusive": exclusive,
            "gpus_per_node": gpus_per_node, "cpus_per_task": cpus_per_task, "mem": mem, "account": account, "qos": qos,
            "through_first": out_of_cluster, "attach_to": attach_to, "bind_to": bind_to,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value or name == "exclusive"}
        super().__init__("slurm", meshes, env, options=options, patience=job_start_timeout)

    def add_mesh(self, name: str, num_nodes: "int | Role") -> None:
        """Adds a mesh of so many nodes. Raises ValueError after the job was applied."""
        if self.active:
            raise ValueError("the job runs: a mesh can only be added before")
        self._wish({**{mesh: self._role(mesh) for mesh in self._meshes}, name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Leaves the rest of each node to other jobs. Raises RuntimeError where `clusterscope` is not installed."""
        try:
            scope = importlib.import_module("clusterscope")
        except ImportError:
            raise RuntimeError("share_node asks clusterscope for a share of a node: pip install clusterscope") from None
        share = scope.job_gen_task_slurm(
            partition=partition, gpus_per_task=gpus_per_task, tasks_per_node=tasks_per_node
        )
        overrides = {"exclusive": False, "cpus_per_task": share["cpus_per_task"], "mem": share["memory"]}
        self._options = {**self._options, **overrides}

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            self._options = {**self._options, "client_script": os.path.abspath(client_script)}
        if self._options.get("log_dir"):
            os.makedirs(self._options["log_dir"], exist_ok=True)
        super()._create(None)
        if client_script is not None:
            self.dump(os.path.join(self._folder, "batch.json"))


class Slurm(JobAdapter):
    """Asks `sbatch`, `squeue --json` and `scancel`. The ids of agents are `job/rank`."""

    keep_s = 3600.0  # users may have waited for these nodes
    takes_places = True

    def start(self, wanted: AgentsWanted) -> Agents:
        """Submits one batch job for all meshes with equal hosts, and others for the rest."""
        agents: dict[str, Agent] = {}
        job = Running(wanted.job, str(wanted.folder), agents, dict(wanted.options))
        groups: dict[str, list[str]] = {}
        for name in wanted.names:
            role = wanted.role(name)
            groups.setdefault(repr((role.gpus, role.cpus, role.memory, role.image)), []).append(name)
        try:
            for number, names in enumerate(groups.values()):
                file = f"wanted-{number}.json"
                prepare(wanted, names, file)
                agents.update(self._submit(wanted, names, file, number))
        except BaseException:  # an interrupt too
            self.kill(job)
            raise
        return agents

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Submits one more batch job, of so many nodes, or of named ones."""
        file = f"{wanted.names[-1]}.wanted"
        number = len({_number(agent) for agent in job.agents.values()})  # never 0, which has the client script
        prepare(wanted, wanted.names, file)
        return self._submit(wanted, wanted.names, file, number)

    def release(self, going: Running, job: Running) -> None:
        """Cancels batch jobs without remaining agents; makes others release the nodes of agents that end.

        The first node of a batch job, where its script runs, remains with the others.
        """
        stays = {name: agent for name, agent in job.agents.items() if name not in going.agents}
        remaining = {_number(agent) for agent in stays.values()}
        ended = {name: agent for name, agent in going.agents.items() if _number(agent) not in remaining}
        self.kill(structs.replace(job, agents=ended))
        for number in dict.fromkeys(map(_number, going.agents.values())):
            if number in remaining:
                self._give_back(number, {node for name, agent in going.agents.items()
                                         if _number(agent) == number and (node := _node(job, name))})  # fmt: skip

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the agents according to Slurm."""
        refresh_folder(job.folder)
        states = {number: self._state(number) for number in dict.fromkeys(map(_number, job.agents.values()))}
        return {name: self._seen(job, name, states[_number(agent)]) for name, agent in job.agents.items()}

    def kill(self, job: Running) -> None:
        """Cancels the batch jobs, and blocks until Slurm reports that they end."""
        numbers = list(dict.fromkeys(map(_number, job.agents.values())))
        if not numbers:
            return
        with contextlib.suppress(EngineError):  # SIGTERM would be a notice to the agents
            running = [number for number in numbers if self._runs(number)]
            if len(running) < len(numbers):  # Slurm would try for minutes to signal a waiting job
                ask(["scancel", "--quiet", *(number for number in numbers if number not in running)], _PACKAGE)
            if running:
                ask(["scancel", "--quiet", f"--signal={END.name[3:]}", *running], _PACKAGE, seconds=_TIDY_S)
                self._await_end(running, _RUNNING, _TIDY_S)
        ask(["scancel", "--quiet", *numbers], _PACKAGE)
        self._await_end(numbers, _WAITING | _RUNNING, _KILL_S)

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "slurm")

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the output of all hosts of the batch job, with srun's rank prefixes."""
        number, _, rank = job.agents[name].id.partition("/")
        lines = last_lines(_logs(job, number), ALL_LINES)
        own = [line.partition(": ")[2] for line in lines if line.partition(": ")[0].strip() == rank]
        return (own or lines)[-count:]

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns a step of the same batch job, on the node of the agent."""
        line = ["srun", f"--jobid={_number(job.agents[name])}", "--overlap", "--pty", "--ntasks=1"]
        node = _node(job, name)
        return [*line, *([f"--nodelist={node}"] if node else []), "bash", "-i"]

    @staticmethod
    def _submit(wanted: AgentsWanted, names: Sequence[str], file: str, number: int) -> dict[str, Agent]:
        output = ask(["sbatch", "--parsable"], _PACKAGE, _script(wanted, names, file, number))
        slurm = output.strip().splitlines()[-1].partition(";")[0]
        if number:
            with open(wanted.folder / OTHER_JOBS, "a") as stream:
                stream.write(f"{slurm}\n")
        return {name: Agent(f"{slurm}/{rank}") for rank, name in enumerate(names)}

    def _give_back(self, number: str, ended: Collection[str]) -> None:
        first, *rest = _nodes(self._state(number)) or [""]
        remaining = [node for node in rest if node not in ended]
        if len(remaining) < len(rest):
            ask(["scontrol", "update", f"JobId={number}", f"NodeList={','.join([first, *remaining])}"], _PACKAGE)

    def _runs(self, number: str) -> bool:
        states = {*_states(self._state(number))}
        return bool(states & _RUNNING) and "COMPLETING" not in states

    def _await_end(self, numbers: Sequence[str], living: Collection[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(set(_states(self._state(n))) & set(living) for n in numbers):
            time.sleep(_LOOK_S)

    def _state(self, number: str) -> dict[str, object]:
        """Returns squeue's entry of a batch job; empty if there is none."""
        try:
            text = ask(["squeue", "--json", "--states=all", f"--jobs={number}"], _PACKAGE)
            entries: list[dict[str, Any]] = json.loads(text).get("jobs", [])
        except EngineError as error:
            if "Invalid job id" in str(error):
                return {}
            raise
        except ValueError as error:
            raise EngineError(f"squeue --json gave no JSON ({error}): Slurm 20.11 or newer is needed") from None
        return next((entry for entry in entries if str(entry.get("job_id")) == number), {})

    def _seen(self, job: Running, name: str, state: Mapping[str, object]) -> Seen:
        number = _number(job.agents[name])
        states = _states(state)
        if not states:
            return Seen("ended", f"(Slurm job {number}) is not known to Slurm any more")
        if states[0] in _WAITING:
            requeued = " again, after it was requeued" if state.get("restart_cnt") else ""
            reason, stuck = _waiting_reason(number, state)
            description = f"waits in Slurm's queue{requeued} (job {number}: {reason})"
            if stuck:
                description = f"{description}, and will for ever: {stuck}"
            return Seen("waiting", description, stuck=bool(stuck))
        if states[0] in _RUNNING and "COMPLETING" not in states:
            return seen_of(job, name, f", Slurm job {number}")
        reason = str(state.get("state_reason") or "")
        end = next((code for code in states if code != "COMPLETING" and code not in _RUNNING), None)
        end = end or _CODES.get(reason, "COMPLETING")
        ending = _ENDS.get(end, end.lower())
        suffix = f" ({reason})" if reason not in ("", "None", *_CODES) else ""
        words = log_words(last_lines(_logs(job, number), ALL_LINES))
        return Seen("ended", f"is gone: Slurm job {number} {ending}{suffix}{words}")


def _number(agent: Agent) -> str:
    return agent.id.partition("/")[0]


def _node(job: Running, name: str) -> str:
    """Returns Slurm's name of an agent's node, from the agent's report; empty if there is none."""
    report = read_report(Path(job.folder, f"{name}.json"))
    return "" if report is None or not report.joins else report.joins[0].removeprefix("tcp://").rpartition(":")[0]


def _waiting_reason(number: str, state: Mapping[str, Any]) -> tuple[str, str]:
    """Returns Slurm's reason and, if it does not pass by itself, what it means and what to do."""
    reason = str(state.get("state_reason") or "None")
    if reason == "None":
        return "Slurm has given no reason yet", ""
    nodes = state.get("node_count")
    count = nodes.get("number") if isinstance(nodes, dict) else nodes  # a table in newer versions
    words = {"number": number, "partition": state.get("partition"), "nodes": counted(int(count or 1), "node")}
    stuck = _STUCK.get(reason, "it asks for more than a limit allows" if _LIMITS.fullmatch(reason) else "")
    message = str(state.get("state_description") or "")
    return f"{reason}, {message}" if message and message != reason else reason, stuck.format_map(words)


def _states(state: Mapping[str, Any]) -> list[str]:
    """Returns the states of a batch job; newer versions of Slurm have a list."""
    states = state.get("job_state") or []
    return [states] if isinstance(states, str) else list(states)


def _nodes(state: Mapping[str, Any]) -> list[str]:
    nodes = str(state.get("nodes") or "")
    return ask(["scontrol", "show", "hostnames", nodes], _PACKAGE).split() if nodes else []


def _logs(job: Running, number: str) -> list[Path]:
    folder = Path(job.options.get("log_dir") or job.folder)
    return sorted(folder.glob(f"slurm_{number}_*"))


def _script(wanted: AgentsWanted, names: Sequence[str], file: str, number: int) -> str:
    """Returns the script for sbatch, for equal hosts."""
    config, role = wanted.options, wanted.role(names[0])
    logs = config.get("log_dir") or wanted.folder
    options = {
        "job-name": config.get("job_name", "monarch_job"),
        "nodes": len(names),
        "nodelist": ",".join(wanted.places) or None,
        "ntasks-per-node": config.get("ntasks_per_node", 1),
        "output": f"{logs}/slurm_%j_{number}.out",
        "time": config.get("time_limit"),
        "partition": config.get("partition"),
        "account": config.get("account"),
        "qos": config.get("qos"),
        "gpus-per-node": role.gpus if role.gpus is not None else config.get("gpus_per_node"),
        "cpus-per-task": role.cpus if role.cpus is not None else config.get("cpus_per_task"),
        "mem": role.memory or config.get("mem"),
        "container-image": role.image or None,
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={_plain(name, value)}" for name, value in options.items() if value is not None]
    # A requeued job has other hosts, and the loss of one node does not affect the others.
    lines += ["#SBATCH --no-requeue", "#SBATCH --no-kill"]
    lines += ["#SBATCH --exclusive"] if config.get("exclusive", True) else []
    lines += [f"#SBATCH {_plain('slurm_args', word)}" for word in config.get("slurm_args", ()) if _OPTION.match(word)]
    work = f"{_SRUN.format(nodes=len(names))} {worker_line(wanted, file, 'SLURM_PROCID', '$SLURMD_NODENAME')}"
    client = config.get("client_script")
    if client is None or number:
        # SIGTERM is for the agents, to which Slurm sends it as well: srun would react by killing them at once.
        return "\n".join([
            *lines,
            "set -m; trap : TERM",
            f"{work} &",
            "while wait $!; status=$?; [ $status -gt 128 ] && kill -0 $! 2>/dev/null; do :; done",
            "exit $status",
            "",
        ])  # fmt: skip
    python, batch = shlex.quote(str(config.get("python", "python3"))), shlex.quote(str(wanted.folder / "batch.json"))
    return "\n".join([
        *lines,
        f"{work} &",
        f"until [ -s {batch} ]; do sleep 0.2; done",
        f"MONARCH_BATCH_JOB=1 MONARCH_NB_BATCH_JOB={batch} {python} {shlex.quote(str(client))}",
        "status=$?",
        f"others=$(cat {shlex.quote(str(wanted.folder / OTHER_JOBS))} 2>/dev/null)",
        f"scancel --quiet --signal={END.name[3:]} $SLURM_JOB_ID $others",
        '[ -z "$others" ] || scancel --quiet $others',
        "wait",
        "exit $status",
        "",
    ])  # fmt: skip


def _plain(name: str, value: object) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ValueError(f"{name}={text!r} has more than one line")
    return text


register_job("slurm", Slurm)
