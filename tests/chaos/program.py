"""The controller of a chaos run: works without end, and obeys commands in lines of JSON.

`python -m tests.chaos.program FOLDER NUMBER`: number 0 spawns, others attach its mesh; FOLDER/hosts.json says how
to get hosts. Commands are {"do": "heal", "seconds": N}, {"do": "detach"} and {"do": "end"}; each is answered by one
line.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import monarch_nb.actor
from monarch_nb import attach, configure, results
from monarch_nb.actor import Actor, ValueMesh, context, current_rank, endpoint, heal_mesh
from monarch_nb.connect import AttachError, attach_hosts, shutdown
from monarch_nb.exceptions import DeviceMeshError
from monarch_nb.job import SlurmJob, SSHJob, job_load
from tests.chaos.ledger import Ledger, read_effects, unread_calls

BOUND = float(os.environ.get("CHAOS_BOUND", "45"))  # seconds within which every call has to end
LEASE = 3.0  # seconds without a connection after which a host is lost
HEAL_S = float(os.environ.get("CHAOS_HEAL", "10"))  # seconds within which one heal has to end
SLOTS = 2
HOSTS = 3
THREADS = 3
PAUSE = float(os.environ.get("CHAOS_PAUSE", "0.02"))  # between the calls of a thread


class Worker(Actor):
    """Records the calls that reach it, in a file of its own, before it answers."""

    def __init__(self, folder: str) -> None:
        rank = context().actor_instance.rank.rank
        path = f"{folder}/effects-{rank}-{os.getpid()}-{time.monotonic_ns()}"
        self.file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self.rank = rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def mark(self, token: str, body: bytes = b"") -> tuple[int, str]:
        os.write(self.file, f"{token}\n".encode())
        return self.rank, token


class Caller(Actor):
    """Calls workers from its own process."""

    @endpoint
    def relay(self, workers: Any, token: str) -> list[tuple[int, str]]:
        return list(workers.mark.call(token).get(BOUND - 5).values())

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)


class Work:
    """Calls of all kinds, until it is ended."""

    def __init__(self, folder: Path, number: int) -> None:
        self._ledger = Ledger(folder / f"ledger-{number}")
        self._number = number
        self._over = threading.Event()
        self.workers: Any = None
        self.callers: Any = None
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(THREADS)]

    def start(self, workers: Any, callers: Any) -> None:
        self.workers, self.callers = workers, callers
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Blocks until the last call is over."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        dice = random.Random(self._number * THREADS + index)
        count = 0
        while not self._over.is_set():
            count += 1
            token = f"{self._number}.{index}.{count}"
            kind = dice.choice(["all", "all", "one", "one", "host", "relay", "body", "cast"])
            began = time.monotonic()
            self._ledger.began(token, kind)
            try:
                self._ledger.ended(token, began, self._ranks(token, self._call(kind, token, dice)))
            except BaseException as error:
                self._ledger.ended(token, began, None, error)
                self._over.wait(PAUSE)
            self._over.wait(PAUSE)

    def _call(self, kind: str, token: str, dice: random.Random) -> Any:
        """Its future; None if nobody answers."""
        host, slot = dice.randrange(self.workers.size("hosts")), dice.randrange(SLOTS)
        match kind:
            case "all":
                return self.workers.mark.call(token)
            case "one":
                return self.workers.slice(hosts=host, slots=slot).mark.call(token)
            case "host":
                return self.workers.slice(hosts=host).mark.call(token)
            case "relay":
                return self.callers.slice(hosts=host, slots=slot).relay.call_one(self.workers, token)
            case "body":
                return self.workers.mark.call(token, dice.randbytes(200_000))
            case _:
                self.workers.mark.broadcast(token)
                return None

    def _ranks(self, token: str, future: Any) -> list[int]:
        """Waits for an answer, and reads it; returns the ranks that have answered."""
        if future is None:
            return []
        if future.wait(BOUND):
            self._ledger.reads(token)
        answer = future.get(0.0)
        return [rank for rank, _ in (answer.values() if isinstance(answer, ValueMesh) else answer)]


def unread_answers(folder: Path, number: int, workers: Any) -> list[str]:
    """Returns answers of ranks to the former controller that it had not read, and that are not stored.

    Those of ranks that do not answer any more are not counted: their processes have ended since.
    """
    effects = read_effects(folder)  # before the results: later effects may be answered later
    unread = unread_calls(folder / f"ledger-{number - 1}")
    pids = {}
    for rank in range(len(workers)):
        host, slot = divmod(rank, SLOTS)
        try:  # answered after all that came before
            pids[rank] = workers.slice(hosts=host, slots=slot).pid.call_one().get(20)
        except (DeviceMeshError, TimeoutError):
            continue
    answers = results(workers)
    stored = {tuple(value) for mesh in answers for value in mesh.values().values() if isinstance(value, (list, tuple))}
    answers.forget()
    return [
        f"rank {rank} answered {token}, which is lost"
        for rank, pid, token in effects
        if token in unread and pids.get(rank) == pid and (rank, token) not in stored
    ]


def heal(work: Work, seconds: float) -> dict[str, Any]:
    """Heals until all answers; returns the time that took, and the obstacles."""
    began, obstacles, last = time.monotonic(), [], ""
    while time.monotonic() - began < seconds:
        try:
            heal_mesh(work.workers, timeout=HEAL_S)
            pids = list(work.workers.pid.call().get(10).values())
            work.callers.rank.call().get(10)
            return {"seconds": time.monotonic() - began, "told": obstacles, "pids": pids}
        except (DeviceMeshError, TimeoutError) as error:  # a host is not back yet, or was lost once more
            last = f"{type(error).__name__}: {error}"
            if last.partition("\n")[0] not in obstacles:
                obstacles.append(last.partition("\n")[0])
            time.sleep(0.1)
    return {"seconds": time.monotonic() - began, "told": obstacles, "failed": last}


def leave(procs: Any, work: Work) -> None:
    """Detaches the mesh, also where an agent ends just then."""
    while True:
        try:
            procs.detach("10m")
            return
        except RuntimeError as error:
            sys.stderr.write(f"{error}\n")
            heal(work, 60.0)


def say(**words: Any) -> None:
    sys.__stdout__.write(json.dumps(words) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def job_of(folder: Path, how: dict[str, Any]) -> Any:
    """The job that gives the hosts: the one that runs, else a new one; None where there is none."""
    path = str(folder / "job.json")
    if os.path.exists(path):
        return job_load(path)
    if "ssh" in how:
        return SSHJob(
            how["python"], ["-i", how["identity"]], known_hosts=how["known_hosts"], meshes={"trainers": how["ssh"]},
            reach=how["reach"], env=how["env"],
        )  # fmt: skip
    return SlurmJob({"trainers": HOSTS}, how["python"], env=how["env"]) if "slurm" in how else None


def hosts_of(folder: Path) -> Any:
    """The hosts to spawn on. Blocks until they have joined."""
    how = json.loads((folder / "hosts.json").read_text())
    if "attach" in how:
        return attach_hosts(how["attach"], key=how["key"], lease=LEASE, timeout=30)
    return job_of(folder, how).state(str(folder / "job.json")).trainers


def meshes(folder: Path, number: int) -> tuple[Any, Any, Any, str]:
    """Processes, workers and callers, and how they came to be."""
    how, name = "spawned", Path(folder, "team")  # of the mesh: one that could not be attached may be kept for a while
    if number > 0:
        try:
            procs: Any = attach(name.read_text(), steal=True)
            return procs, attach("workers"), attach("callers"), "attached"
        except AttachError as error:
            how = f"spawned, as {error}"
    name.write_text(f"team{number}")
    procs = hosts_of(folder).spawn_procs(per_host={"slots": SLOTS}, name=name.read_text())
    workers: Any = procs.spawn("workers", Worker, str(folder))
    callers: Any = procs.spawn("callers", Caller)
    workers.pid.call().get(60)
    return procs, workers, callers, how


def main() -> None:
    folder, number = sys.argv[1:]
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.stdout = sys.stderr  # for output of attach and the ranks
    monarch_nb.actor.unhandled_fault_hook = lambda failure: None  # type: ignore[attr-defined]
    configure(heal_max_restarts=1_000_000, mesh_keep="10m")
    work = Work(Path(folder), int(number))
    procs, workers, callers, how = meshes(Path(folder), int(number))
    lost = unread_answers(Path(folder), int(number), workers) if how == "attached" else []
    work.start(workers, callers)
    say(how=how, lost=lost)
    for line in sys.stdin:
        match json.loads(line):
            case {"do": "heal", "seconds": seconds}:
                say(**heal(work, seconds))
            case {"do": "detach"}:
                work.end()
                leave(procs, work)
                shutdown()
                say(ended=True)
                return
            case _:
                break
    work.end()
    configure(mesh_keep="0s")
    procs.stop().get(30)
    job = job_of(Path(folder), {})
    if job is not None:
        job.kill()
    shutdown()
    say(ended=True)


if __name__ == "__main__":
    main()
