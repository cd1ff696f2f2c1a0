"""Requests of a growing mesh to its job, with an engine of the test whose hosts come on command or never."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from monarch_nb._private import try_lock
from monarch_nb.job import Agent, AgentsWanted, EngineError, JobAdapter, Role, Running, Seen, elastic
from monarch_nb.job.arrival import Arrival
from monarch_nb.job.elastic import JobHosts
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.mesh.host_record import Fate, NoMoreHostsError
from monarch_nb.runtime import current_runtime
from monarch_nb.testing import Cluster
from tests.polling import until

pytestmark = [pytest.mark.timeout(60)]


class Engine(JobAdapter):
    """Its agents wait in a queue."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.calls: list[AgentsWanted] = []
        self.refusal = ""  # the reason of its refusals
        self.ended = ""  # the end of all agents
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.released: list[str] = []

    def start(self, wanted: AgentsWanted) -> dict[str, Agent]:
        return self.add(Running(wanted.job, "", {}), wanted)

    def add(self, job: Running, wanted: AgentsWanted) -> dict[str, Agent]:
        self.calls.append(wanted)
        assert self.may_answer.wait(20)
        if self.refusal:
            raise EngineError(self.refusal)
        new = {name: Agent(f"id of {name}") for name in wanted.names}
        self.agents.update(new)
        return new

    def release(self, going: Running, job: Running) -> None:
        assert job.agents.items() >= going.agents.items()
        self.released += going.agents
        for name in going.agents:
            self.agents.pop(name)

    def look(self, job: Running) -> Mapping[str, Seen]:
        state = Seen("ended", self.ended) if self.ended else Seen("waiting", "waits for a node")
        return dict.fromkeys(job.agents, state)

    def kill(self, job: Running) -> None:
        self.agents.clear()

    def running(self) -> dict[str, Running]:
        return {}


class Job:
    known_as = "TestJob 7"

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.adapter, self.folder = engine, folder
        self.agents: dict[str, Agent] = {"fleet_0": Agent("id of fleet_0"), "fleet_1": Agent("id of fleet_1")}
        self.arrivals: list[Arrival] = []
        self.spare_agents: tuple[str, ...] = ()
        self.host_ids: dict[str, str] = {}
        self.role = Role()
        self.obstacle: OSError | None = None  # to writing the job to its folder
        engine.agents.update(self.agents)

    def keep_agents(self, agents: dict[str, Agent], spares: Iterable[str] | None = None) -> None:
        if not self.agents:
            raise EngineError("the job was killed")
        self.agents = agents
        self.spare_agents = tuple(name for name in spares or () if name in agents)
        if self.obstacle is not None:
            raise self.obstacle

    def joined(self, hosts: Mapping[str, str]) -> None:
        self.host_ids |= hosts

    def running(self, agents: dict[str, Agent]) -> Running:
        return Running("7", str(self.folder), dict(agents))

    def wanting(self, mesh: str, names: Any, places: Any) -> AgentsWanted:
        return AgentsWanted("7", tuple(names), self.folder, places=tuple(places))

    def written(self, mesh: str) -> str:
        return ""

    def role_of(self, mesh: str) -> Role:
        return self.role

    def arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)

    def kill(self) -> None:
        self.agents = {}
        for arrival in self.arrivals:
            arrival.stop("the job was killed")
        self.adapter.kill(self.running({}))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.may_answer.set()
    until(lambda: "monarch-hosts-end" not in {thread.name for thread in threading.enumerate()}, "no thread stays")


@pytest.fixture
def job(engine: Engine, simulated: Cluster, tmp_path: Path) -> Job:
    return Job(engine, tmp_path)


@pytest.fixture
def hosts(job: Job) -> JobHosts:
    return JobHosts(job, "fleet")


def is_unchanged(job: Job, engine: Engine) -> bool:
    return list(engine.agents) == list(job.agents) == ["fleet_0", "fleet_1"]


def test_hosts_that_are_late_are_released_with_the_reason(hosts: JobHosts, job: Job, engine: Engine) -> None:
    with pytest.raises(NoMoreHostsError, match=r"TestJob 7 has given fleet no 2 more hosts within 0.2 s: 0/2 hosts.*"
                                               r"fleet_2.*wait for a node.* monarch-nb job ls"):  # fmt: skip
        hosts.more(2, 0.2)
    assert is_unchanged(job, engine)
    with pytest.raises(NoMoreHostsError):
        hosts.more(1, 0)
    assert [request.names for request in engine.calls] == [("fleet_2", "fleet_3"), ("fleet_4",)], "no name comes twice"


def test_an_engine_that_refuses_or_ends_hosts_is_quoted(hosts: JobHosts, job: Job, engine: Engine) -> None:
    engine.refusal = "the budget is spent"
    with pytest.raises(NoMoreHostsError, match=r"TestJob 7 gives fleet no other host, .* changed: the budget is spent"):
        hosts.more(1, 20)
    engine.refusal, engine.ended = "", "has failed: no such image"
    with pytest.raises(
        NoMoreHostsError, match=r"(?s)nothing has changed: 1 of the hosts .*fleet_\d has failed: no such"
    ):
        hosts.more(1, 20)
    assert is_unchanged(job, engine)


def test_a_full_disk_gives_no_hosts_and_is_the_reason(hosts: JobHosts, job: Job, engine: Engine) -> None:
    job.obstacle = OSError(28, "No space left on device", "job.json")
    with pytest.raises(NoMoreHostsError, match=r"no other host, .* changed: .*No space left on device: 'job.json'"):
        hosts.more(1, 20)
    assert is_unchanged(job, engine)


def test_machines_are_named_only_to_engines_that_let_users_choose(hosts: JobHosts, engine: Engine) -> None:
    with pytest.raises(NoMoreHostsError, match=r"its engine chooses the machines[.] Say how many: hosts=2"):
        hosts.more(["node7", "node8"], 20)
    assert engine.calls == []
    engine.takes_places = True
    with pytest.raises(NoMoreHostsError):
        hosts.more(["node7", "node8"], 0)
    assert [request.places for request in engine.calls] == [("node7", "node8")]


def test_engines_say_which_lost_hosts_ended_or_are_silent(
    hosts: JobHosts, job: Job, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.joined({"fleet_0": "node4", "fleet_1": "node5"})
    states = {"fleet_0": Seen("running", "on node4", host="node4"), "fleet_1": Seen("unknown", "on node5")}
    answers = threading.Event()
    monkeypatch.setattr(engine, "look", lambda job: answers.wait(20) and {name: states[name] for name in job.agents})
    monkeypatch.setattr(elastic, "_ANSWER_S", 0.2)
    with pytest.raises(NoMoreHostsError, match=r"the engine of TestJob 7 has not answered within 0.2 s"):
        hosts.fate(["node4"])
    answers.set()
    monkeypatch.setattr(elastic, "_ANSWER_S", 20.0)
    assert hosts.fate(["node5"]) == {"node5": Fate(False, "fleet_1 on node5")}
    fates = hosts.fate(["node4", "node9"])
    assert fates == {
        "node4": Fate(False, "fleet_0 on node4"),
        "node9": Fate(True, "it is no host of TestJob 7 any more"),
    }
    states = {"fleet_0": Seen("running", "on node4", host="node8"), "fleet_1": Seen("waiting", "waits in the queue")}
    assert [fate.ended for fate in hosts.fate(["node4", "node5"]).values()] == [True, True], "others come instead"

    def refuse(job: Running) -> Mapping[str, Seen]:
        raise EngineError("squeue: Unable to contact slurm controller")

    monkeypatch.setattr(engine, "look", refuse)
    with pytest.raises(NoMoreHostsError, match=r"TestJob 7 cannot be asked for its hosts: squeue: Unable to contact"):
        hosts.fate(["node4"])


@pytest.mark.parametrize("when", ["while the engine is asked", "while hosts are waited for"])
def test_an_interrupt_ends_the_wait_and_later_what_was_started(
    hosts: JobHosts, job: Job, engine: Engine, when: str
) -> None:
    if when == "while the engine is asked":
        engine.may_answer.clear()

    def press_stop() -> None:
        until(lambda: bool(engine.calls and (job.arrivals or not engine.may_answer.is_set())))
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press_stop, name="pytest_timeout stop", daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match=r"stopped waiting for hosts of TestJob 7: .* and nothing has changed"):
        hosts.more(2, 600)
    engine.may_answer.set()
    until(lambda: engine.released == ["fleet_2", "fleet_3"])
    until(lambda: is_unchanged(job, engine))
    engine.ended = "comes no more"
    with pytest.raises(NoMoreHostsError, match="comes no more"):  # and the next request is heard
        hosts.more(1, 20)


def test_killing_the_job_ends_the_wait_and_leaves_nothing(hosts: JobHosts, job: Job, engine: Engine) -> None:
    errors: list[BaseException] = []

    def grow() -> None:
        with pytest.raises(Exception, match=r"TestJob 7: the job was killed") as raised:
            hosts.more(1, 600)
        errors.append(raised.value)

    thread = threading.Thread(target=grow)
    thread.start()
    until(lambda: bool(job.arrivals))
    engine.release = lambda going, job: None  # type: ignore[method-assign, assignment]
    job.kill()
    thread.join(20)
    assert (len(errors), engine.agents, job.agents) == (1, {}, {})
    engine.may_answer.clear()
    threading.Timer(0.05, engine.may_answer.set).start()
    with pytest.raises(NoMoreHostsError, match="nothing has changed: the job was killed"):
        hosts.more(1, 600)


def test_a_full_folder_is_reported_and_no_host_is_requested(hosts: JobHosts, job: Job, engine: Engine) -> None:
    job.folder = Path("/proc/self")
    with pytest.raises(NoMoreHostsError, match=r"nothing has changed: \[Errno"):
        hosts.more(1, 20)
    assert engine.calls == []


@pytest.fixture
def news(job: Job) -> Iterator[list[str]]:
    """The notices of hosts; the second host of the job is a spare."""
    job.role, job.spare_agents = Role(spares=1), ("fleet_1",)
    (job.folder / "fleet_1.log").touch()  # it has written something
    lines: list[str] = []
    current_runtime().part(HostNotices).present(lambda event: lines.append(event.text))
    yield lines
    current_runtime().part(HostNotices).present(None)


def test_spares_that_fail_are_reported_and_retried_a_few_times(job: Job, engine: Engine, news: list[str]) -> None:
    engine.ended = "has failed: no such image"
    hosts = JobHosts(job, "fleet")
    until(lambda: news and news[-1].endswith("has no spare host any more: 3 came to nothing within 600 s"), str(news))
    assert [request.names for request in engine.calls] == [("fleet_2",), ("fleet_3",), ("fleet_4",)]
    assert news[0] == "TestJob 7: the spare host fleet_1 has failed: no such image. No mesh was on it"
    until(lambda: list(engine.agents) == list(job.agents) == ["fleet_0"], "they were let go")
    assert hosts.waiting == ()
    hosts.close()


def test_a_spare_requested_while_the_job_is_killed_ends_at_once(job: Job, engine: Engine, news: list[str]) -> None:
    engine.may_answer.clear()
    engine.ended = "has failed"
    hosts = JobHosts(job, "fleet")
    until(lambda: engine.calls, "another one is asked for")
    hosts.close()
    job.kill()
    engine.may_answer.set()
    until(lambda: engine.released == ["fleet_1", "fleet_2"], "it ends")
    assert engine.agents == {}
    assert len(news) == 1


def test_an_engine_that_gives_no_other_spare_says_so(job: Job, engine: Engine, news: list[str]) -> None:
    engine.refusal, engine.ended = "the budget is spent", "has failed"
    JobHosts(job, "fleet")
    until(lambda: len(news) == 2, "it is reported")
    assert news[1] == "TestJob 7: there is no new spare host for fleet: the budget is spent"


def test_two_meshes_given_hosts_at_once_are_both_recorded(hosts: JobHosts, job: Job, engine: Engine) -> None:
    loaders = JobHosts(job, "loaders")
    engine.may_answer.clear()
    threads = [threading.Thread(target=lambda mesh=mesh: _refused(mesh), daemon=True) for mesh in (hosts, loaders)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.calls) == 2, "both have asked")
    engine.may_answer.set()
    until(lambda: {"fleet_2", "loaders_0"} <= job.agents.keys(), "both are written down")
    for thread in threads:
        thread.join(20)
    assert is_unchanged(job, engine)


OTHER = """
import os, sys, time
from pathlib import Path
from monarch_nb.job.elastic import locked
folder = Path(sys.argv[1])
with locked(str(folder), lambda: None):
    print("held", flush=True)
    sys.stdin.readline()
    (folder / "fleet_7.asked").touch()
print("let go", flush=True)
"""


@pytest.mark.parametrize("chooses", [False, True])
def test_another_process_that_gets_hosts_for_the_job_is_waited_for(
    hosts: JobHosts, job: Job, engine: Engine, chooses: bool
) -> None:
    engine.chooses = chooses
    line = [sys.executable, "-c", OTHER, str(job.folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        thread = threading.Thread(target=lambda: _refused(hosts), daemon=True)
        thread.start()
        assert not engine.calls
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "let go\n"
    thread.join(20)
    assert [request.names for request in engine.calls] == [("fleet_8",)]
    assert is_unchanged(job, engine)


def test_an_interrupt_ends_the_wait_for_another_process_too(hosts: JobHosts, job: Job, engine: Engine) -> None:
    with elastic.locked(str(job.folder), lambda: None):
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt, match="stopped waiting"):
            hosts.more(1, 30.0)
    assert not engine.calls


def test_engines_that_choose_are_asked_one_at_a_time(hosts: JobHosts, job: Job, engine: Engine) -> None:
    engine.chooses = True
    loaders = JobHosts(job, "loaders")
    engine.may_answer.clear()
    threads = [threading.Thread(target=lambda mesh=mesh: _refused(mesh), daemon=True) for mesh in (hosts, loaders)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.calls) == 1, "one has asked")
    folder = os.open(job.folder, os.O_RDONLY)
    try:
        assert not try_lock(folder)
    finally:
        os.close(folder)
    assert len(engine.calls) == 1
    engine.may_answer.set()
    until(lambda: len(engine.calls) == 2, "then the other one")
    for thread in threads:
        thread.join(20)
    assert is_unchanged(job, engine)


def _refused(mesh: JobHosts) -> None:
    with pytest.raises(NoMoreHostsError):
        mesh.more(1, 1.0)
