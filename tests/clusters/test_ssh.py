"""Jobs on machines behind OpenSSH servers in network namespaces, which are cut off, killed and started again."""

from collections.abc import Iterator

import pytest

from tests.chaos.network import objection
from tests.cluster.engine_tools import needs
from tests.clusters.machines import Machines

needs("sshd", "ssh-keygen", package="openssh-server openssh-client")
pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(objection()), reason=f"NOT TESTED HERE: {objection()}"),
]
SPAWN = (
    "from tests.clusters.actors import Counter\n"
    "hosts = job.state(None).trainers\n"
    "counters = hosts.spawn_procs(name='pair').spawn('counters', Counter)\n"
    "counters.add.call().get(60).values()"
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"), 2)
    yield made
    made.close()


@pytest.mark.parametrize("reach", ["direct", "tunnel"])
def test_a_job_runs_on_two_machines_and_leaves_nothing_there(machines: Machines, reach: str) -> None:
    console = machines.console()
    first = console.ask(machines.job(f"reach={reach!r}") + SPAWN)
    assert [count for count, _ in first] == [1, 1]
    assert all(machines.agents(end) for end in (1, 2))
    console.ask("job.kill()")
    console.close()
    assert not any(machines.agents(end) for end in (1, 2))
