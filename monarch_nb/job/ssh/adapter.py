"""Agents on machines reached by SSH: starting, finding and ending them, on used and free machines of a job."""

import asyncio
import concurrent.futures
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_nb.connect.routes import Tunnel
from monarch_nb.job.adapter import (
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Running,
    Seen,
    living_jobs,
    mesh_of,
)
from monarch_nb.job.record import register_tunnel
from monarch_nb.job.report import Ask, HelperReply
from monarch_nb.job.ssh.machine import SSHMachine, read_machine
from monarch_nb.transport import knock

_LONGEST_S = 240.0
_KNOCK_S = 0.7
_CLOSING_S = 2.0


class SSHLoop:
    """An event loop on a thread of its own until `end`, which leaves no thread and no descriptor."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def end(self) -> None:
        """Ends the loop after its earlier tasks. Does not block."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_finish())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


async def _finish() -> None:
    """Gives closing connections a moment; cancels the rest."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_CLOSING_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    # A closing one keeps its socket while its other end does not read the rest. asyncio lists them nowhere else.
    for transport in tuple(getattr(asyncio.get_running_loop(), "_transports", {}).values()):
        transport.abort()
    await asyncio.sleep(0)  # in which they are closed


class SSH(JobAdapter):
    """Connections live on an event loop of their own thread; requests to machines run concurrently."""

    watch_s = 2.0
    chooses = True
    takes_places = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: SSHLoop | None = None
        self._machines: dict[tuple[str, str], SSHMachine] = {}
        self._uses: dict[str, int] = {}  # jobs that connections are kept for

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts an agent for each name, on the machine that the job's options have for it."""
        job = Running(wanted.job, str(wanted.folder), {}, dict(wanted.options))
        machines = dict(zip(wanted.names, first_machines(wanted.options), strict=True))
        self.hold(job, True)
        try:
            errors = self._start(job, wanted, machines)
            if errors:
                count = f"{len(errors)} of {len({*machines.values()})} machines"
                raise EngineError(f"agents could not be started on {count}:\n{errors_text(errors)}")
        except BaseException:  # an interrupt too
            self._kill(job, list(dict.fromkeys(machines.values())), forgive=True)
            self.hold(job, False)
            raise
        return {name: Agent(machine) for name, machine in machines.items()}

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Starts agents on the named machines, or on machines of the job that have none of its agents.

        If such a machine fails, the next one is tried, and at last those on which an agent has ended.
        """
        free, ended = list(wanted.places or unused(job, mesh_of(wanted.names[0]))), not wanted.places
        started, errors = dict[str, Agent](), dict[str, str]()
        try:
            while lacking := [name for name in wanted.names if name not in started]:
                if len(free) < len(lacking) and ended:
                    ended = False
                    free += (job.agents[name].id for name, state in self.look(job).items() if state.state == "ended")
                machines = dict(zip(lacking, free, strict=False))
                if len(machines) < len(lacking):
                    raise EngineError(refusal(job, len(wanted.names), wanted.places, errors))
                del free[: len(machines)]
                failed = self._start(job, wanted, machines)
                errors.update(failed)
                agents = {name: Agent(machine) for name, machine in machines.items()}
                started.update({name: agent for name, agent in agents.items() if agent.id not in failed})
                self._release(job, {name: agent for name, agent in agents.items() if agent.id in failed}, forgive=True)
        except BaseException:
            self._release(job, started, forgive=True)
            raise
        return started

    def release(self, going: Running, job: Running) -> None:
        """Ends these agents alone. Raises EngineError for machines that cannot be asked."""
        self._release(going, going.agents, forgive=False)

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the agents from the helpers on their machines."""
        machines = dict.fromkeys(agent.id for agent in job.agents.values())
        answers = self._ask(job, {machine: Ask(do="look", job=job.job) for machine in machines})
        states = {}
        for name, agent in job.agents.items():
            answer = answers[agent.id]
            if isinstance(answer, HelperReply):
                state = answer.seen.get(name, Seen("ended", "is not known there any more"))
                states[name] = state._replace(description=f"on {agent.id}, {state.description}")
            else:
                states[name] = Seen("unknown", str(answer))
        return states

    def kill(self, job: Running) -> None:
        """Ends the agents. Raises EngineError for machines that cannot be asked: their agents stay."""
        self._kill(job, list(dict.fromkeys(agent.id for agent in job.agents.values())), forgive=False)
        with self._lock:
            self._uses.pop(job.job, None)
            self._tidy()

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "ssh")

    def join(self, job: Running, name: str, joins: Sequence[str]) -> Sequence[str]:
        """Returns its own addresses and the one that SSH has dialled, or a local port forwarded over SSH."""
        reach, machine = job.options.get("reach", "auto"), self._machine(job, job.agents[name].id)
        port = int(joins[0].rpartition(":")[2])
        direct = addresses(joins, machine.address, port)
        if reach == "direct" or (reach == "auto" and any(knock(join, _KNOCK_S) for join in direct)):
            return direct
        with self._lock:
            loop = self._loop
        address = f"tcp://127.0.0.1:{asyncio.run_coroutine_threadsafe(machine.way(port), loop).result(_LONGEST_S)}"

        def listens(seconds: float) -> bool | None:
            work = asyncio.run_coroutine_threadsafe(machine.knock(port), loop)
            try:
                return work.result(seconds)
            except (TimeoutError, concurrent.futures.CancelledError):
                work.cancel()
                return None

        route = f"port {port} of {machine.name}, through SSH"
        register_tunnel(address, job, name, tuple(joins), Tunnel(route, listens, machine.trouble))
        return (address,)

    def detour(self, job: Running) -> str:
        """Recommends the SSH connection."""
        return "reach it through the SSH connection: SSHJob(…, reach='tunnel')"

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines that the agent's worker has written."""
        machine = job.agents[name].id
        answer = self._ask(job, {machine: Ask(do="lines", job=job.job, count=count)})[machine]
        if isinstance(answer, EngineError):
            raise answer
        return answer.lines.get(name, [])

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns an `ssh` command line."""
        user, host, port = read_machine(job.agents[name].id)
        words = ["-p", port] if port else []
        for option, letter in (("ssh_port", "-p"), ("username", "-l"), ("tunnel", "-J")):
            words += [letter, str(job.options[option])] if option in job.options and letter not in words else []
        for option, letter in (("client_keys", "-i"), ("config", "-F")):
            words += [word for file in job.options.get(option, ()) for word in (letter, file)]
        if "known_hosts" in job.options:
            words += ["-o", f"UserKnownHostsFile={job.options['known_hosts']}"]
        return ["ssh", *words, f"{user}@{host}" if user else host]

    def hold(self, job: Running, keep: bool) -> None:
        """Counts the uses of a job's connections; the last one ends the thread of all connections."""
        with self._lock:
            count = self._uses.pop(job.job, 0) + (1 if keep else -1)
            if count > 0:
                self._uses[job.job] = count
            self._tidy()

    def _tidy(self) -> None:
        for key, machine in tuple(self._machines.items()):
            if not machine.busy and not machine.jobs & self._uses.keys():
                asyncio.run_coroutine_threadsafe(machine.close(), self._loop)
                del self._machines[key]
        if not self._machines and self._thread is not None:
            thread, self._thread = self._thread, None
            thread.end()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._thread is None:
                self._thread = SSHLoop("monarch-ssh")
            return self._thread.loop

    def _machine(self, job: Running, name: str) -> SSHMachine:
        options = {option: value for option, value in job.options.items() if option not in ("machines", "more")}
        with self._lock:
            machine = self._machines.setdefault((name, repr(sorted(options.items()))), SSHMachine(name, options))
            machine.jobs.add(job.job)
            return machine

    def _ask(self, job: Running, requests: Mapping[str, Ask]) -> dict[str, HelperReply | EngineError]:
        async def ask_one(machine: SSHMachine, request: Ask) -> HelperReply | EngineError:
            try:
                return await machine.ask(request)
            except EngineError as error:
                return error

        async def ask_all(machines: Sequence[SSHMachine]) -> list[HelperReply | EngineError]:
            return await asyncio.gather(*(ask_one(*pair) for pair in zip(machines, requests.values(), strict=True)))

        with self._lock:
            machines = [self._machine(job, name) for name in requests]
            for machine in machines:
                machine.busy += 1
            loop = self._loop
        try:
            # An interrupt ends the wait, not the work: agents that a machine has begun to start are ended later.
            answers = asyncio.run_coroutine_threadsafe(ask_all(machines), loop).result(_LONGEST_S)
            return dict(zip(requests, answers, strict=True))
        finally:
            with self._lock:
                for machine in machines:
                    machine.busy -= 1
                self._tidy()

    def _start(self, job: Running, wanted: AgentsWanted, machines: Mapping[str, str]) -> dict[str, str]:
        """Starts an agent for each name on its machine; returns the machines that have failed, and why."""
        key = wanted.secret.read_text()
        reach, port = wanted.options.get("reach", "auto"), wanted.options.get("port", 0)
        bind = f"tcp://{'127.0.0.1' if reach == 'tunnel' else '0.0.0.0'}:{port}"
        requests = {
            machine: Ask(
                do="start", job=wanted.job, address=bind, known_as=read_machine(machine).host, key=key,
                keep_s=wanted.keep_s,
                names={name: wanted.environment_of(name) for name, assigned in machines.items() if assigned == machine},
            )
            for machine in dict.fromkeys(machines.values())
        }  # fmt: skip
        answers = self._ask(job, requests)
        errors = {machine: str(answer) for machine, answer in answers.items() if isinstance(answer, EngineError)}
        for machine, answer in answers.items():
            if isinstance(answer, HelperReply):
                dead = [f"{name} {state.description}" for name, state in answer.seen.items() if state.state == "ended"]
                errors.update({machine: f"{machine}: {'; '.join(dead)}"} if dead else {})
        return errors

    def _release(self, job: Running, agents: Agents, *, forgive: bool) -> None:
        names: dict[str, dict[str, dict[str, str]]] = {}
        for name, agent in agents.items():
            names.setdefault(agent.id, {})[name] = {}
        self._end(job, {machine: Ask(do="end", job=job.job, names=group) for machine, group in names.items()}, forgive)

    def _kill(self, job: Running, machines: Sequence[str], *, forgive: bool) -> None:
        self._end(job, {machine: Ask(do="kill", job=job.job) for machine in machines}, forgive)

    def _end(self, job: Running, requests: Mapping[str, Ask], forgive: bool) -> None:
        errors = [str(answer) for answer in self._ask(job, requests).values() if isinstance(answer, EngineError)]
        if errors and not forgive:
            raise EngineError("agents may still run, kill() the job again later:\n" + "\n".join(errors))


def first_machines(options: Mapping[str, Any]) -> list[str]:
    """Returns the machines of all meshes."""
    return [machine for machines in options["machines"].values() for machine in machines]


def unused(job: Running, mesh: str) -> list[str]:
    """Returns the machines for a mesh that have no agent of the job, each as often as it is named."""
    used = Counter(agent.id for agent in job.agents.values())
    candidates = [*job.options["machines"].get(mesh, ()), *job.options.get("more", ())]
    counts, free = Counter[str](), list[str]()
    for machine in candidates:
        counts[machine] += 1
        if counts[machine] > used[machine]:
            free.append(machine)
    return free


def refusal(job: Running, count: int, machines: Sequence[str], errors: Mapping[str, str]) -> str:
    """Explains why no `count` more agents can be started; `errors` has those of the machines that were tried."""
    failed = f"agents could not be started on {', '.join(errors)}:\n{errors_text(errors)}" if errors else ""
    if machines:
        return failed
    used = ", ".join(dict.fromkeys(agent.id for agent in job.agents.values()))
    return (
        f"its machines do not suffice for {count} more (in use: {used}). Name another one: "
        f"mesh.grow(hosts=['node7']), or give the job more of them: SSHJob(…, more=['node7'])"
        + (f"\n{failed}" if failed else "")
    )


def errors_text(errors: Mapping[str, str]) -> str:
    """Formats errors by machine, one a line."""
    return "\n".join(f"  {error}" for error in errors.values())


def addresses(joins: Sequence[str], dialled: str, port: int) -> tuple[str, ...]:
    """Returns addresses to reach an agent directly: its own ones, and the one that SSH has dialled, if any."""
    number = f"[{dialled}]" if ":" in dialled else dialled
    return tuple(dict.fromkeys([*joins, *([f"tcp://{number}:{port}"] if dialled else [])]))
