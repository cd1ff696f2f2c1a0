"""Jobs on machines behind OpenSSH servers in network namespaces, which are cut off, killed and started again."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.network import objection
from tests.cluster.engine_tools import needs
from tests.clusters.actors import COUNTS, SPAWN, get_another_key
from tests.clusters.console import Console
from tests.clusters.machines import Machines
from tests.polling import until

needs("sshd", "ssh-keygen", package="openssh-server openssh-client")
pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
pytestmark = [
    pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.skipif(bool(objection()), reason=f"NOT TESTED HERE: {objection()}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    instance = Machines(tmp_path_factory.mktemp("machines"), 2)
    yield instance
    instance.close()


@pytest.mark.parametrize("reach", ["direct", "tunnel"])
def test_a_job_runs_on_two_machines_and_leaves_nothing_there(machines: Machines, reach: str) -> None:
    console = machines.console()
    first = console.ask(machines.job(f"reach={reach!r}") + SPAWN)
    assert [count for count, _ in first] == [1, 1]
    assert all(machines.agents(end) for end in (1, 2))
    console.ask("job.kill()")
    console.close()
    assert not any(machines.agents(end) for end in (1, 2))


@pytest.fixture
def console(machines: Machines) -> Iterator[Console]:
    instance = machines.console()
    yield instance
    instance.kill()
    for end, server in enumerate(machines.servers, 1):
        machines.network.plug(end)
        if server.process.poll() is not None:
            server.start()
        for pid in machines.agents(end):
            os.kill(pid, signal.SIGKILL)


def lost(console: Console) -> list[str]:
    """The reasons why hosts count as lost in a controller."""
    reasons: list[str] = console.ask(LOST)
    return reasons


LOST = (
    "from monarch_nb.connect.routes import HostRoutes\n"
    "from monarch_nb.runtime import current_runtime\n"
    "[remote.lost for remote in current_runtime().part(HostRoutes).attached.values() if remote.lost]"
)


def test_a_tunnel_cut_for_25_seconds_costs_only_time(machines: Machines, console: Console) -> None:
    first = console.ask(machines.job("reach='tunnel'") + SPAWN)
    machines.network.pull(1)
    console.tell(COUNTS)
    time.sleep(25)  # the cut itself: SSH gives its connection up after 15 s
    machines.network.plug(1)
    assert console.answer() == [[2, pid] for _, pid in first]
    assert lost(console) == []
    assert "lost" not in console.said()


def test_sshd_that_is_killed_and_started_again_costs_nothing_either(machines: Machines, console: Console) -> None:
    first = console.ask(machines.job("reach='tunnel'") + SPAWN)
    for server in machines.servers:
        server.cut()
    console.tell(COUNTS)
    time.sleep(8)  # longer than a refusal on a direct link counts as the agent's end
    for server in machines.servers:
        server.start()
    assert console.answer() == [[2, pid] for _, pid in first]
    assert lost(console) == []
    console.ask("job.kill()")


def test_agents_killed_behind_a_tunnel_are_lost_with_the_remote_reason(machines: Machines, console: Console) -> None:
    console.ask(machines.job("reach='tunnel'") + SPAWN)
    [agent] = machines.agents(2)
    os.kill(agent, signal.SIGKILL)
    until(lambda: len(lost(console)) == 1, "its host is lost")
    with pytest.raises(RuntimeError, match="SupervisionError"):
        console.ask(COUNTS)
    [reason] = lost(console)
    expected = f"on {machines.servers[1].name}, (process {agent}) has ended", "nobody listens at port"
    assert any(text in reason for text in expected), reason
    assert "127.0.0.1" not in reason
    console.ask("from monarch_nb.actor import heal_mesh\nheal_mesh(counters, replace=True, timeout=60)")
    assert console.ask(COUNTS)[1][0] == 1
    console.ask("job.kill()")


def test_tunnels_cut_past_the_lease_lose_the_host_with_the_reason(machines: Machines, console: Console) -> None:
    console.ask("from monarch_nb import settings\n" + machines.job("reach='tunnel'") + SPAWN)
    console.ask(LEASE)
    machines.servers[0].cut()
    console.tell(COUNTS)
    with pytest.raises(RuntimeError, match=r"through SSH for 6 s: the SSH connection is cut for \d+ s \("):
        console.answer()
    [reason] = lost(console)
    assert f"of {machines.servers[0].name}, through SSH" in reason
    assert "refuses the connection" in reason, "what the last attempt saw"
    assert "nobody listens at" not in reason
    machines.servers[0].start()
    until(lambda: lost(console) == [], "the tunnel is there again, and the host")
    console.ask("from monarch_nb.actor import heal_mesh\nheal_mesh(counters, timeout=60)", 90)
    assert console.ask(COUNTS)[0][0] == 1
    console.ask("job.kill()")


LEASE = """
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.runtime import current_runtime
for remote in current_runtime().part(HostRoutes).attached.values():
    remote.lease = remote._wanted_lease = 6.0
    remote.join().get(20)
"""


def test_another_kernel_attaches_behind_tunnels_and_its_tunnels_heal(machines: Machines, console: Console) -> None:
    first = console.ask(machines.job("reach='tunnel'") + SPAWN)
    console.ask("counters.detach(lease=120)")
    console.close()
    second = machines.console()
    assert second.ask("from monarch_nb import attach\ncounters = attach('counters')\n" + COUNTS) == [
        [2, pid] for _, pid in first
    ]
    for server in machines.servers:
        server.cut()
    second.tell(COUNTS)
    time.sleep(8)
    for server in machines.servers:
        server.start()
    assert second.answer() == [[3, pid] for _, pid in first]
    second.kill()


@pytest.mark.parametrize("reach", ["direct", "tunnel"])
def test_a_job_gets_another_key_while_it_works(machines: Machines, console: Console, reach: str) -> None:
    console.ask(machines.job(f"reach={reach!r}"))
    get_another_key(console)
    console.ask("job.kill()")


TRAINERS = """
import monarch_nb
from monarch_nb.diagnosis import abort
from tests.clusters.actors import Trainer
hosts = job.state(None).trainers
procs = hosts.spawn_procs(name='pair')
trainers = procs.spawn('trainers', Trainer)
trainers.join.call().get(90).values()
"""
FINDINGS = "[[item.kind, item.ranks, item.sure, item.text] for item in monarch_nb.diagnose(trainers).findings]"


def test_a_hang_over_two_machines_is_explained_and_ended(machines: Machines, console: Console, tmp_path: Path) -> None:
    """Also a rank stopped by a signal, one that cannot be reached, and the source of a NaN."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pids = console.ask(machines.job("reach='direct'") + TRAINERS, 120)
    console.ask(f"call = trainers.reduce.call({str(pipe)!r})\nNone")

    def is_found(kind: str, ranks: list[int], sure: bool, words: str) -> bool:
        findings = console.ask(FINDINGS)
        return bool(findings) and findings[0][:3] == [kind, ranks, sure] and words in findings[0][3]

    missing = "hosts=1 has not begun all_reduce no. 1 (actors.py:"
    until(lambda: is_found("missing_from_collective", [1], True, missing), "the missing rank is named", 60)
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: is_found("stopped", [1], True, "stopped by a signal"), "the stopped rank is named", 60)
    os.kill(pids[1], signal.SIGCONT)
    machines.network.pull(2)
    until(lambda: [entry[1] for entry in console.ask(FINDINGS)][:1] == [[1]], "the rank that is cut off is named", 60)
    machines.network.plug(2)
    until(lambda: is_found("missing_from_collective", [1], True, missing), "the missing rank is named again", 60)
    assert console.ask("abort(trainers).ended").startswith("ended: trainers.reduce()")
    pipe.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"CallAbortedError.* hosts=1 has not begun all_reduce no\. 1"):
        console.ask("call.get(30)")
    console.ask("trainers.join.call().get(30)\nNone")
    console.ask(
        "from monarch_nb.diagnosis import watch\nwith watch(trainers) as found:\n"
        "    trainers.reduce.call('/dev/null', -1.0).get(60)\nNone",
        90,
    )
    [text] = console.ask("[each.text for each in found.findings]")
    assert text.startswith("hosts=1: in call 1 of reduce() aten.log.default gave 1 NaN")
    console.ask("job.kill()")
