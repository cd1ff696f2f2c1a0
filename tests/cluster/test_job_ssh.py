"""Jobs on machines reached by SSH: a real sshd on this machine's loopback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, SupervisionError, endpoint, heal_mesh
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import EngineError, SSHJob, job_load, running_jobs
from tests.cluster.detach_tools import Controller, come_back
from tests.cluster.engine_tools import PYTHON, SSHServer, command_of, needs, none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

needs("sshd", "ssh-keygen", package="openssh-server openssh-client")
pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
pytestmark = [pytest.mark.clusters, pytest.mark.timeout(120), pytest.mark.usefixtures("host")]
LIGHT = {"MONARCH_NB_PRELOAD": "", "MARK": "ssh"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHServer]:
    server = SSHServer(tmp_path_factory.mktemp("ssh"))
    yield server
    server.close()


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def job_at(server: SSHServer, machines: Any = None, **options: Any) -> SSHJob:
    meshes = machines or {"trainers": [server.name]}
    return SSHJob(PYTHON, f"-i {server.identity}", known_hosts=str(server.known_hosts), meshes=meshes, **options)


class Probe(Actor):
    @endpoint
    def mark(self) -> tuple[str, int, str]:
        return os.environ["MARK"], os.getpid(), os.environ.get("SSH_CONNECTION", "")


def workers_of(server: SSHServer) -> list[int]:
    """Pids of the agents started through the server."""
    listing = subprocess.run(["pgrep", "-f", "monarch_nb.job.worker"], capture_output=True, text=True, check=False)
    folder = str(server.folder / "there")
    return [pid for pid in map(int, listing.stdout.split()) if folder in command_of(pid)]


def test_hosts_start_over_ssh_and_another_process_finds_and_ends_them(server: SSHServer, tmp_path: Path) -> None:
    start = time.monotonic()
    job = job_at(server, {"trainers": [server.name] * 2, "loaders": [server.name]}, env=LIGHT)
    try:
        state = job.state(cached_path=str(tmp_path / "job.json"))
        procs = state.trainers.spawn_procs(per_host={"gpus": 2})
        marks = procs.spawn("probe", Probe).mark.call().get(SOON).values()
        seconds = time.monotonic() - start
        assert seconds < 15, seconds  # 3 on a quiet machine
        assert {mark for mark, _, _ in marks} == {"ssh"}
        assert all(connection for _, _, connection in marks), "it was sshd that started them"
        job.wait(SOON)
        workers = workers_of(server)
        assert len(workers) == 3
        secret = Path(job._folder, "key").read_text().splitlines()[-1].strip()
        for pid in workers:
            assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        [entry] = running_jobs("ssh")
        assert entry.apply_id == job.apply_id
        code = f"from monarch_nb.job import job_load; job_load({str(tmp_path / 'job.json')!r}).kill()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
        assert none_alive(workers)
        with pytest.raises(RuntimeError, match=r"the job is gone: .*is not known there any more"):
            job.state(None)
        assert not (tmp_path / "job.json").exists()
    finally:
        job.kill()
    assert list((server.folder / "there" / "monarch-nb" / "jobs").iterdir()) == []


@pytest.mark.slow
def test_a_mesh_grows_onto_free_or_named_machines_and_returns_them(
    server: SSHServer, tmp_path: Path, shown: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    second, closed = SSHServer(server.folder), SSHServer(server.folder)
    closed.close()
    job = job_at(server, env=LIGHT, more=[closed.name, second.name])
    try:
        procs = job.state(cached_path=str(tmp_path / "job.json")).trainers.spawn_procs()
        actors = procs.spawn("probe", Probe)
        [[_, first, _]] = actors.mark.call().get(SOON).values()
        assert procs.grow(hosts=1, timeout=SOON).sizes["hosts"] == 2
        replies = actors.mark.call().get(SOON).values()
        assert [(mark, connection.split()[-1]) for mark, _, connection in replies] == [
            ("ssh", str(server.port)),
            ("ssh", str(second.port)),
        ]
        with pytest.raises(
            NoMoreHostsError, match=rf"(?s)do not suffice for 1 more .*hosts=\['node7'\].*{closed.name}: port "
        ):
            procs.grow(hosts=1, timeout=SOON)
        with pytest.raises(NoMoreHostsError, match=f"could not be started on {closed.name}"):
            procs.grow(hosts=[server.name, closed.name], timeout=SOON)
        assert len(workers_of(server)) == 2, "the one that could be started has ended again"
        assert procs.grow(hosts=[server.name], timeout=SOON).sizes["hosts"] == 3
        pids = [pid for _, pid, _ in actors.mark.call().get(SOON).values()]
        assert pids[0] == first
        copy = job_load(str(tmp_path / "job.json"))
        assert isinstance(copy, SSHJob)
        assert [agent.id for agent in copy._agents.values()] == [server.name, second.name, server.name]
        assert procs.shrink(hosts=[1, 2]).sizes["hosts"] == 1
        assert none_alive(pids[1:])
        until(lambda: len(workers_of(server)) == 1, "their agents have ended")
        assert list(job.agents) == ["trainers_0"]
        os.kill(workers_of(server)[0], 9)
        with pytest.raises(SupervisionError):
            until(lambda: actors.mark.call().get(SOON) is None, "its end")
        assert heal_mesh(actors, replace=True, timeout=SOON) is actors
        [[_, _, connection]] = actors.mark.call().get(SOON).values()
        assert connection.split()[-1] == str(second.port)
        procs.grow(hosts=1, timeout=SOON)  # where the first ended
        pids = [pid for _, pid, _ in actors.mark.call().get(SOON).values()]
        copy.kill()  # which does not know the later ones
        assert none_alive(pids)
        assert workers_of(server) == []
    finally:
        job.kill()
        second.close()
    assert list((server.folder / "there" / "monarch-nb" / "jobs").iterdir()) == []


def test_a_tunnel_is_enough_and_returns_after_a_cut_connection(server: SSHServer) -> None:
    job = job_at(server, reach="tunnel", env=LIGHT)
    try:
        actors = job.state(cached_path=None).trainers.spawn_procs().spawn("probe", Probe)
        _, pid, _ = actors.mark.call_one().get(SOON)
        [join] = [remote.endpoint for remote in remotes() if not remote.lost]
        assert join.startswith("tcp://127.0.0.1:")
        server.cut()
        assert alive(pid)
        server.start()
        assert actors.mark.call_one().get(SOON)[1] == pid
    finally:
        job.kill()
    assert none_alive([pid])


@pytest.mark.slow
def test_a_mesh_behind_tunnels_is_attached_by_another_process(server: SSHServer, tmp_path: Path) -> None:
    job = job_at(server, {"trainers": [server.name] * 2}, reach="tunnel", env=LIGHT)
    try:
        job.apply()
        job.dump(str(tmp_path / "job.json"))
        first = Controller(tmp_path, "leave_job", str(tmp_path / "job.json")).done()
        come_back(tmp_path / "state", first)
    finally:
        job.kill()
    assert none_alive([int(pid) for pid in first.said("pids")[0]])


KILLED = """
import sys
from monarch_nb.job import SSHJob
job = SSHJob(sys.argv[1], f"-i {sys.argv[2]}", known_hosts=sys.argv[3], meshes={"trainers": [sys.argv[4]] * 2})
job.keep_for(1)
job.apply()
print("started", flush=True)
"""


@pytest.mark.slow
def test_a_program_killed_while_starting_a_job_leaves_nothing(server: SSHServer) -> None:
    words = [PYTHON, str(server.identity), str(server.known_hosts), server.name]
    with subprocess.Popen([sys.executable, "-c", KILLED, *words], stdout=subprocess.PIPE) as program:
        until(lambda: bool(workers_of(server)), "the first agent")
        program.kill()
        assert program.stdout is not None
        assert program.stdout.read() == b"", "it was still starting"
    until(lambda: not workers_of(server), "the end of all")


def remotes() -> list[Any]:
    from monarch_nb.connect.routes import HostRoutes
    from monarch_nb.runtime import current_runtime

    return list(current_runtime().part(HostRoutes).attached.values())


@pytest.mark.slow
def test_a_worker_killed_over_ssh_is_reported_with_its_machine(server: SSHServer, shown: list[Any]) -> None:
    job = job_at(server, env=LIGHT)
    try:
        actors = job.state(cached_path=None).trainers.spawn_procs().spawn("probe", Probe)
        actors.mark.call_one().get(SOON)
        [worker] = workers_of(server)
        os.kill(worker, 9)
        with pytest.raises(SupervisionError):
            until(lambda: actors.mark.call_one().get(SOON) is None, "its end")
        with pytest.raises(RuntimeError, match=rf"is gone: .* on {server.name}, \(process {worker}\) has ended"):
            job.state(None)
    finally:
        job.kill()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"python_exe": "/no/such/python"}, r"/no/such/python with monarch-nb does not run there: .*[Nn]o such file"),
        ({"ssh_args": ""}, "the login was refused .* it must go without a password"),
        ({"known_hosts": "/dev/null"}, "its host key is not known here"),
        ({"meshes": {"trainers": ["127.0.0.1:1"]}}, "127.0.0.1:1: port 1 of 127.0.0.1 refuses the connection"),
    ],
    ids=["python", "key", "host-key", "port"],
)
def test_faults_of_a_machine_are_reported_with_the_remedy_and_tidied(
    server: SSHServer, change: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without the user's own keys
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    arguments = {"python_exe": PYTHON, "ssh_args": f"-i {server.identity}", "known_hosts": str(server.known_hosts),
             "meshes": {"trainers": [server.name]}, **change}  # fmt: skip
    job = SSHJob(**arguments)
    with pytest.raises(EngineError, match=rf"on 1 of 1 machines:\n.*{pattern}"):
        job.apply()
    assert not job.active
    assert workers_of(server) == []
    assert running_jobs("ssh") == []


@pytest.mark.slow
def test_one_failing_machine_of_two_takes_the_others_agent_along(server: SSHServer) -> None:
    job = job_at(server, {"trainers": [server.name, "127.0.0.1:1"]})
    with pytest.raises(EngineError, match="on 1 of 2 machines"):
        job.apply()
    assert none_alive(workers_of(server))


def test_arguments_of_ssh_that_are_not_understood_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ssh_args: .*-X.*belongs into ~/\.ssh/config"):
        SSHJob(ssh_args=["-X"])
    with pytest.raises(ValueError, match="needs a list of machines"):
        SSHJob().add_mesh("trainers", "node1")
    with pytest.raises(ValueError, match="reach="):
        SSHJob(reach="maybe")  # type: ignore[arg-type]
    job = SSHJob("python", ("-J", "login", "-p", "2222"))
    job.add_mesh("trainers", ["a", "b"])
    assert repr(job) == "<SSHJob trainers=2>"


@pytest.mark.slow
def test_the_last_machine_is_a_spare_that_replaces_a_lost_one(
    server: SSHServer, shown: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    job = job_at(server, {"trainers": [server.name] * 2}, env=LIGHT, spares=1)
    try:
        hosts = job.state(cached_path=None).trainers
        actors = hosts.spawn_procs().spawn("probe", Probe)
        _, pid, _ = actors.mark.call_one().get(SOON)
        until(lambda: hosts.spares, "the spare")
        [spare] = hosts.spares
        worker = next(
            agent for agent in workers_of(server) if str(agent) in job.adapter.look(job._job)["trainers_0"].description
        )
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            until(lambda: actors.mark.call_one().get(SOON) is None, "its end")
        heal_mesh(actors, timeout=SOON)
        assert actors.mark.call_one().get(SOON)[1] != pid
        assert hosts.host_ids[0] == spare
        until(
            lambda: "there is no new spare host for trainers" in caplog.text or hosts.spares, "another one, or why not"
        )
    finally:
        job.kill()
